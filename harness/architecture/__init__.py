"""A model's sizes, read from its config without torch."""

from harness.architecture.config_file import check_counts, read_config
from harness.architecture.model_shape import ModelShape, load_shape

__all__ = ["ModelShape", "check_counts", "load_shape", "read_config"]
