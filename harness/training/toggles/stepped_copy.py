"""The toggles `master_weights` and `offload: [optimizer]`: an optimizer that steps a copy of the weights,
which is in fp32 or on the host."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness.training.host_memory import host_empty_like, on_host, to_host
from harness.training.toggles.optimizer_state import Build, OfOthers, restore_state


class SteppedCopy(OfOthers):
    """Steps a copy of the trained weights and writes the result back.

    The copy is fp32 (`dtype`, for master weights), in host memory (`host`), or both. With an fp32 copy of
    16-bit weights, AdamW takes 2 (weight) + 4 + 4 + 4 bytes a parameter between steps, and 2 more while there
    is a gradient.
    """

    def __init__(
        self, weights: Sequence[Tensor], build: Build, dtype: torch.dtype | None, *, host: bool
    ) -> None:
        self._host = host
        self._weights = list(weights)
        self._copies = [self._copied(w.detach(), dtype or w.dtype).requires_grad_() for w in weights]
        self._inner = build(self._copies)

    def _copied(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if not self._host:
            return tensor.to(dtype, copy=True)
        copy = to_host(tensor)
        if tensor.device.type not in ("cpu", "meta"):  # before, the host may not read the copy
            torch.accelerator.current_stream(tensor.device).synchronize()
        with on_host():  # the cast is on the host: in one copy with a cast, torch would cast on the GPU first
            return copy.to(dtype)

    def take_gradients(self) -> None:
        """Move every gradient from the weights to the copy, one by one, freeing it on the weights."""
        for weight, copy in zip(self._weights, self._copies, strict=True):
            if weight.grad is not None:
                copy.grad = self._copied(weight.grad, copy.dtype)
                weight.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the copy, then write it back to the weights. The gradients must have been taken."""
        if not self._host:
            self._inner.step()
            for weight, copy in zip(self._weights, self._copies, strict=True):
                weight.copy_(copy)
            return
        with on_host():
            self._inner.step()
            for weight, copy in zip(self._weights, self._copies, strict=True):
                ready = copy if copy.dtype == weight.dtype else host_empty_like(weight).copy_(copy)
                weight.copy_(ready, non_blocking=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the copy's gradients."""
        self._inner.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the optimizer that steps the copy: what is clipped and unscaled."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the optimizer that steps the copy."""
        return self._inner.state

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer that steps the copy, and the copy."""
        return {"inner": self._inner.state_dict(), "copies": self._copies}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        restore_state(self._inner, state_dict["inner"])
        for copy, saved in zip(self._copies, state_dict["copies"], strict=True):
            copy.copy_(saved)
