"""The toggle `loss: fused_linear`: Liger's loss, computed from the hidden states in chunks."""

from __future__ import annotations

from typing import Any

from harness.errors import MissingDependency


def fuse_loss(model: Any) -> None:
    """Replace the model's forward by Liger's, which computes the loss from the hidden states in chunks."""
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError:
        raise MissingDependency("liger-kernel", "liger", "loss: fused_linear") from None
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    only_the_loss = {
        "rope": False,
        "rms_norm": False,
        "cross_entropy": False,
        "fused_linear_cross_entropy": True,
    }
    gate = "geglu" if base.config.model_type.startswith("gemma") else "swiglu"
    _apply_liger_kernel_to_instance(base, **only_the_loss, **{gate: False})
