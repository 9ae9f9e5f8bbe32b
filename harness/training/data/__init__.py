"""From a recipe's data to batches: documents, tokens, rows, packing."""

from harness.training.data.batches import Batches, StepBatches, build_batches

__all__ = ["Batches", "StepBatches", "build_batches"]
