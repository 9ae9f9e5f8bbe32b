"""Where the bytes and the milliseconds of a single-GPU fine-tuning recipe go.

Three independent answers to one question: `napkin` (closed form), `simulate` (the real training
step on shape-only tensors) and `measure` (the real training step on a device).
"""

__version__ = "0.1.0"
