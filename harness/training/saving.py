"""A checkpoint between training steps, as transformers' Trainer writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from harness.training.step import Observer, Training

OPTIMIZER = "optimizer.pt"
"""Trainer's name for it; the weights' are transformers' and peft's own."""
CANNOT_WRITE = (OSError, RuntimeError, SafetensorError)
"""What Python, torch and safetensors raise where the disk is full."""


def save_as_trainer(training: Training, folder: Path, observer: Observer) -> None:
    """The model, or its adapter alone, and the optimizer's state into `folder`, in the phase "saving"."""
    model: Any = training.model
    with observer.phase("saving"):
        model.save_pretrained(folder)
        torch.save(training.optimizer.state_dict(), folder / OPTIMIZER)
