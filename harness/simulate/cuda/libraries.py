"""Where transformers, peft, Liger, Triton and bitsandbytes ask for the device: the answers of a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from harness.recipe import Recipe
from harness.simulate.cuda.says_cuda import as_on_cuda
from harness.training import on_host


def import_bitsandbytes_fast() -> None:
    """Import bitsandbytes without torch's compiler, which its CPU kernels ask for as they are defined.

    That import takes seconds, and no kernel runs on shapes.
    """

    def as_it_is(function: Any = None, **_: Any) -> Any:
        return (lambda f: f) if function is None else function

    if find_spec("bitsandbytes") is not None:
        with patch("torch.compile", as_it_is):
            import bitsandbytes  # noqa: F401


def library_patches(recipe: Recipe, capability: tuple[int, int]) -> Iterator[tuple[str, Any]]:
    """(name, replacement) of what the libraries of `recipe` do otherwise without a GPU of `capability`."""
    yield from _where_transformers_asks(capability)
    if find_spec("triton") is not None:  # its kernels (Liger's) write into tensors that Python made
        yield "triton.runtime.jit.JITFunction.run", lambda *_, **__: None
        yield "triton.runtime.interpreter.InterpretedFunction.run", lambda *_, **__: None
    if recipe.fused_loss and find_spec("liger_kernel") is not None:
        # on a GPU it multiplies into memory that it has, and adds up the head's gradient in place
        from liger_kernel.ops import fused_linear_cross_entropy as liger

        name = "fused_linear_cross_entropy_forward"
        yield f"{liger.__name__}.{name}", as_on_cuda(getattr(liger, name), capability)
    if recipe.upcast_for_kbit:
        import peft

        prepare = _with_cuda(peft.prepare_model_for_kbit_training)
        yield "peft.prepare_model_for_kbit_training", prepare
    if recipe.by_bitsandbytes and find_spec("bitsandbytes") is not None:
        yield "bitsandbytes.functional.get_paged", _paged
        yield "bitsandbytes.functional.fill", lambda *_, **__: None
        yield "bitsandbytes.functional.prefetch_tensor", lambda *_, **__: None


def _where_transformers_asks(capability: tuple[int, int]) -> Iterator[tuple[str, Any]]:
    """maybe_autocast(device_type) does nothing for "meta"; and experts loop where a GPU is too old."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and "maybe_autocast" in vars(module):
            yield f"{name}.maybe_autocast", _maybe_autocast
    experts = sys.modules.get("transformers.integrations.moe")
    # older ones loop in sight, over counts that shapes do not have
    if experts is not None and hasattr(experts, "_grouped_mm_fallback_bwd"):
        asked = as_on_cuda(experts._can_use_grouped_mm, capability)
        yield "transformers.integrations.moe._can_use_grouped_mm", asked


def _with_cuda(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """peft empties the allocator's cache after it has upcast the weights, if there is CUDA."""

    def prepared(*args: Any, **kwargs: Any) -> Any:
        with patch("torch.cuda.is_available", lambda: True):
            return prepare(*args, **kwargs)

    return prepared


def _maybe_autocast(
    device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
) -> Any:
    """transformers.utils.generic.maybe_autocast, for a device that can autocast."""
    if torch.is_autocast_enabled(device_type) or enabled:
        return torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
    return nullcontext()


def _paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
    """bitsandbytes' paged state is CUDA managed memory: not the caching allocator's; the host backs it."""
    with on_host():
        state = torch.zeros(shape, dtype=dtype, device=device)
    state.is_paged = True  # type: ignore[attr-defined]
    return state
