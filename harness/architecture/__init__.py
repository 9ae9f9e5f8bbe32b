"""A model's sizes and layers, read from its config.json without torch."""
# pyright: reportUnusedImport=false

from harness.architecture.adapters import adapted_names, ia3_parts, lora_parts
from harness.architecture.attention import why_no_sdpa, with_attention
from harness.architecture.config_file import LAYERS, MAX_CONFIG_BYTES, check_counts, read_config
from harness.architecture.layers import (
    TOWER,
    Matrix,
    head_of,
    matrices_of,
    num_parameters,
    outer_parts,
    parts_of,
    quantized,
)
from harness.architecture.liger import liger_has
from harness.architecture.model_id import config_here, find_config, shipped_config
from harness.architecture.model_shape import Block, ModelShape, load_shape
from harness.architecture.saved_weights import surprises_of_saved_weights
