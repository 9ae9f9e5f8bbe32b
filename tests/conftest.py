"""The surroundings of every test, set before torch is imported."""

from __future__ import annotations

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"  # what is not on this machine fails at once
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: a second thread costs more than it brings

pytest_plugins = ["tests.support.trust_report", "tests.support.attempts"]

# A shell starts its background jobs deaf to Ctrl-C; the tests of interrupts need it heard.
signal.signal(signal.SIGINT, signal.default_int_handler)
