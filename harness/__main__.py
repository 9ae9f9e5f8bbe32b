"""`python -m harness` is `harness`."""

from harness.cli import script

script()
