"""A model's sizes, read from its config without torch."""

from harness.architecture.config_file import MAX_CONFIG_BYTES, check_counts, read_config
from harness.architecture.model_id import config_here, find_config
from harness.architecture.model_shape import Block, ModelShape, load_shape

__all__ = [
    "MAX_CONFIG_BYTES",
    "Block",
    "ModelShape",
    "check_counts",
    "config_here",
    "find_config",
    "load_shape",
    "read_config",
]
