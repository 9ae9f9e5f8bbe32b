"""Loops that are not ours, recorded as `harness run` records its own: steps and phases found by public hooks,
or named by whoever writes the loop; one recorder, and an adapter for a command, a `with`, and two trainers.
"""
# pyright: reportUnusedImport=false

from harness.loops.before_steps import tell_shortage
from harness.loops.callbacks import HarnessCallback, HarnessLightningCallback
from harness.loops.in_python import watch
from harness.loops.process import watch_process
