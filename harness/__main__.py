"""`python -m harness` is `harness`."""

import sys
from pathlib import Path

if not sys.flags.safe_path and Path(sys.path[0]).resolve() != Path(__file__).resolve().parents[1]:
    sys.path.append(sys.path.pop(0))  # the current folder, where an mcp.py or a torch.py is not the library

from harness.cli import script

script()
