"""Records other people's training loops as `harness run` records its own. Hooks find steps and phases, or the
loop's author names them. There is one recorder, with adapters for a command, a `with` block and two trainers.
"""
# pyright: reportUnusedImport=false

from harness.loops.before_steps import tell_shortage
from harness.loops.callbacks import HarnessCallback, HarnessLightningCallback
from harness.loops.in_python import watch
from harness.loops.process import watch_process
