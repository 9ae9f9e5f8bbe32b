"""The surroundings of every test, set before torch is imported."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # what is not on this machine fails at once
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: a second thread costs more than it brings
