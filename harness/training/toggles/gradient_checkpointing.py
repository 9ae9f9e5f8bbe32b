"""The toggle `gradient_checkpointing`: each block keeps its input and computes the rest again."""

from __future__ import annotations

from typing import Any


def checkpoint_blocks(model: Any) -> None:
    # Non-reentrant: it stops recomputing early and needs no input that requires a gradient.
    how = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.2x
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
