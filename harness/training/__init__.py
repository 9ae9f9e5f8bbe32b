"""The one training step, and all that it needs: the model with its toggles, the batches, the loop."""
# pyright: reportUnusedImport=false

from harness.parallel import DTYPES
from harness.training.after_step import AfterStep, HostPeak, evaluate_into, stats_of
from harness.training.batches import Batches, StepBatches
from harness.training.callers_state import undisturbed
from harness.training.evaluation import Evaluation
from harness.training.failures import TOO_LARGE
from harness.training.host_memory import is_beside, is_dense, is_on_host, on_host, to_host
from harness.training.loop import Kind, LoopObserver, Step, remaining_kinds, run_steps, set_up, step_kinds
from harness.training.model import import_libraries
from harness.training.saving import CANNOT_WRITE, save_as_trainer
from harness.training.step import Training
from harness.training.toggles.attention import attention_kernel
from harness.training.toggles.optimizer_state import restore_state
from harness.training.warnings import surprises_of_model
