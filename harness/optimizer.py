"""The optimizer and the gradient scaler of a recipe."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.errors import InputError, MissingDependency
from harness.offload import host_empty_like, on_host, to_host
from harness.recipe import Recipe
from harness.recipe_rules import BITSANDBYTES_OPTIMIZERS

FP16_ADAM_EPS = 1e-4
"""AdamW's eps where its moments are fp16: a usual choice, and one fp16 can hold."""

Build = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


def build_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer over the weights of `model` that require a gradient.

    Raises InputError if nothing requires one.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise InputError(
            "nothing to train: no weight requires a gradient. Set adapter: lora or adapter: none."
        )
    build = _constructor(recipe)
    if recipe.optimizer_in_backward:
        return OptimizerInBackward(trained, build)
    host = "optimizer" in recipe.offload
    if recipe.master_weights or host:
        return SteppedCopy(trained, build, torch.float32 if recipe.master_weights else None, host=host)
    return build(trained)


def _constructor(recipe: Recipe) -> Build:
    """A function from parameters to the recipe's torch or bitsandbytes optimizer.

    sgd has no momentum and so no state. bitsandbytes quantizes the state of tensors with at least
    4096 elements, embeddings included (Trainer keeps 32-bit state for those).
    """
    rates: dict[str, Any] = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}
    if recipe.optimizer in BITSANDBYTES_OPTIMIZERS:
        try:
            import bitsandbytes as bnb
        except ImportError:
            raise MissingDependency("bitsandbytes", None, f"optimizer: {recipe.optimizer}") from None
        classes = {
            "adamw_8bit": bnb.optim.AdamW8bit,
            "paged_adamw_8bit": bnb.optim.PagedAdamW8bit,
            "paged_adamw": bnb.optim.PagedAdamW,
            "lion_8bit": bnb.optim.Lion8bit,
        }
        return lambda params: classes[recipe.optimizer](params, **rates)
    foreach = recipe.optimizer_impl == "foreach"
    if recipe.optimizer == "adafactor":
        return lambda params: torch.optim.Adafactor(params, foreach=foreach, **rates)
    classes = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    fused = recipe.optimizer_impl == "fused"
    if recipe.optimizer == "adamw" and recipe.precision == "fp16" and not recipe.master_weights:
        # 1e-8 is 0 in fp16, and so is the square of a small gradient: the update would be 0 / 0
        rates["eps"] = FP16_ADAM_EPS
    return lambda params: classes[recipe.optimizer](params, foreach=foreach, fused=fused, **rates)


class SteppedCopy(torch.optim.Optimizer):
    """Steps a copy of the trained weights and writes the result back.

    The copy is fp32 (`dtype`, for master weights), in host memory (`host`), or both. With fp32 masters
    on 16-bit weights the step rests at 2 (weight) + 4 + 4 + 4 bytes a parameter, and 2 more while a
    gradient is there.
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
        _wait_for(tensor.device)
        with on_host():  # the cast happens in host memory: torch would cast on the GPU first
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
        """State and the copied weights."""
        return {"inner": self._inner.state_dict(), "copies": self._copies}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        restore_state(self._inner, state_dict["inner"])
        for copy, saved in zip(self._copies, state_dict["copies"], strict=True):
            copy.copy_(saved)


class OptimizerInBackward(torch.optim.Optimizer):
    """Steps each weight in backward, as soon as its gradient is complete, and frees the gradient."""

    def __init__(self, weights: Sequence[Tensor], build: Build) -> None:
        self._each = {weight: build([weight]) for weight in weights}
        this = weakref.ref(self)

        def step_one(weight: Tensor) -> None:
            optimizer = this()
            if optimizer is not None:
                optimizer._each[weight].step()
                optimizer._each[weight].zero_grad(set_to_none=True)

        # A hook that held its weight, here through the optimizer, would keep it for good: no garbage
        # collector sees what autograd holds.
        for weight in weights:
            weight.register_post_accumulate_grad_hook(step_one)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing is left to do after backward."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The gradients are freed already."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """One group a weight."""
        return [group for optimizer in self._each.values() for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The state of every weight."""
        return {weight: optimizer.state[weight] for weight, optimizer in self._each.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state of each optimizer, in the order of the weights."""
        return {"each": [optimizer.state_dict() for optimizer in self._each.values()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for optimizer, saved in zip(self._each.values(), state_dict["each"], strict=True):
            restore_state(optimizer, saved)


def restore_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Give `optimizer` the state that `state_dict` of one like it returned, in memory of the same kind.

    Raises ValueError or KeyError if it was one of other parameters.
    """
    if isinstance(optimizer, SteppedCopy | OptimizerInBackward):  # of several, each restored here
        optimizer.load_state_dict(saved)
        return
    make = getattr(optimizer, "init_state", None)
    if make is None:
        _restore_of_torch(optimizer, saved)
        return
    # bitsandbytes' own load_state_dict would leave paged state on the GPU, and copy its code table for each
    index = 0
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            state = _flat(saved["state"].get(index, {}))
            index += 1
            if not state:  # never stepped
                continue
            make(group, parameter, number, place)
            own = optimizer.state[parameter]
            counts = [value for value in state.values() if isinstance(value, int)]
            if _shapes(own) != _shapes(state) or not all(0 <= count < 2**31 for count in counts):
                raise ValueError("the saved optimizer keeps other state")
            for name, value in state.items():
                if isinstance(value, Tensor):
                    own[name].copy_(value)
                else:
                    own[name] = value
    if index != sum(len(group["params"]) for group in saved["param_groups"]):
        raise ValueError("the saved optimizer has another number of parameters")


def _restore_of_torch(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """torch's own load_state_dict believes what it is given; the first step would fail on it."""
    settings = [_settings(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    if settings != [_settings(group) for group in optimizer.param_groups]:
        raise ValueError("the saved optimizer has other settings")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if state and _shapes(state) != _shapes_after_a_step(optimizer, group, parameter):
                raise ValueError("the saved optimizer keeps other state")
            if state and not 1 <= float(state.get("step", 1)) < 2**31:
                raise ValueError("the saved optimizer has made an impossible number of steps")


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _shapes_after_a_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor
) -> dict[str, Any]:
    """What such an optimizer keeps of such a weight, found with one that has at most 2 of each dimension."""
    small = [min(size, 2) for size in parameter.shape]
    twin = torch.zeros(small, dtype=parameter.dtype).requires_grad_()
    twin.grad = torch.zeros_like(twin)
    other = type(optimizer)([twin])  # type: ignore[call-arg]  (its settings follow)
    other.param_groups[0].update(_settings(group) | {"fused": False})
    other.step()
    shapes = _shapes(other.state[twin])
    for name, shape in shapes.items():
        if isinstance(shape, torch.Size) and shape:
            sizes = zip(shape, small, parameter.shape, strict=True)
            shapes[name] = torch.Size([whole if size == part else size for size, part, whole in sizes])
    return shapes


def _shapes(state: dict[str, Any]) -> dict[str, Any]:
    """What each entry is: the shape of a tensor, the type of anything else."""
    return {n: value.shape if isinstance(value, Tensor) else type(value) for n, value in state.items()}


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    """bitsandbytes' state_dict puts what it quantized into a dict of its own."""
    flat: dict[str, Any] = {}
    for name, value in state.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, also for fp16 weights.

    torch refuses to unscale fp16 gradients because small ones are lost; training with fp16 weights and
    no master copy has that loss by its nature, and the recipe asked for it.
    """

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` of one with the same settings returned. Raises ValueError for anything
        else: torch would believe it until the next step."""
        own = self.state_dict()
        expected = own | {name: state_dict.get(name) for name in ("scale", "_growth_tracker")}
        if state_dict != expected or _shapes(state_dict) != _shapes(own):
            raise ValueError("the saved scaler has other settings")
        if not (0 < state_dict["scale"] < math.inf and 0 <= state_dict["_growth_tracker"] < 2**31):
            raise ValueError("the saved scaler has a scale or a count that is impossible")
        super().load_state_dict(state_dict)


def build_scaler(recipe: Recipe, device: torch.device) -> GradScaler | None:
    """GradScaler for fp16 and fp16-mixed, else None."""
    return GradScaler(device.type) if recipe.scaled else None


def _wait_for(device: torch.device) -> None:
    """Host copies are queued; the host may read them only after this."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.current_stream(device).synchronize()
