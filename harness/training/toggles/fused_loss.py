"""The toggle `loss: fused_linear`: Liger's loss, computed from the hidden states in chunks."""

from __future__ import annotations

from typing import Any

from harness.errors import InputError, MissingDependency


def fuse_loss(model: Any) -> None:
    """Replace the model's forward by Liger's, which computes the loss from the hidden states in chunks."""
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError:
        raise MissingDependency("liger-kernel", "liger", "loss: fused_linear") from None
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise InputError(
            f"loss: fused_linear: Liger has no {base.config.model_type} model; set loss: standard."
        )
    only_the_loss = {
        "rope": False,
        "rms_norm": False,
        "cross_entropy": False,
        "fused_linear_cross_entropy": True,
    }
    gate = "geglu" if base.config.model_type.startswith("gemma") else "swiglu"
    _apply_liger_kernel_to_instance(base, **only_the_loss, **{gate: False})
