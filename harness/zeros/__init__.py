"""A model's checkpoint whose weights are zeros: with the real names, shapes and dtype, in sparse files.

It is for programs on a virtual GPU, where no value of a weight matters. Nothing is downloaded. Importing the
package imports no torch; writing weights does.
"""
# pyright: reportUnusedImport=false

from harness.architecture import shipped_config
from harness.errors import InputError
from harness.system import hub_left_alone, hub_unreached
from harness.zeros.checkpoint import stand_in_folder, write_byte_tokens, write_checkpoint
from harness.zeros.weights import write_weights
