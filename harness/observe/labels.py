"""Labels for a memory profile: which tensors of a training are parameters, gradients or optimizer state."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class Owner(Protocol):
    """What holds a training's tensors: a Training, or what was found of a watched loop (loops/kept.py)."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def optimizer(self) -> Any:
        """An object with the `param_groups` and `state` of a torch.optim.Optimizer."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None: ...


def labelled_tensors(training: Owner) -> Iterator[tuple[str, Tensor]]:
    """(category, tensor) of everything that outlives a step: parameters and optimizer_state.

    Parameters include buffers and the quantization state that bitsandbytes keeps beside a weight.
    The optimizer's own copy of the weights (master weights, offload) is optimizer_state.
    """
    reference = getattr(training, "reference", None)
    for model in [training.model] if reference is None else [training.model, reference]:
        yield from (("parameters", tensor) for tensor in model_tensors(model))
    own = {id(p) for p in training.model.parameters()}
    for group in training.optimizer.param_groups:
        yield from (("optimizer_state", p) for p in group["params"] if id(p) not in own)
    yield from (("optimizer_state", t) for t in tensors_in(dict(training.optimizer.state)))
    if training.scaler is not None and training.scaler.is_enabled():
        scalars = (training.scaler._scale, training.scaler._growth_tracker)
        yield from (("optimizer_state", t) for t in scalars if t is not None)


def owned_tensors(training: Owner) -> Iterator[tuple[str, Tensor]]:
    """(module path, tensor) of the model's tensors and of the optimizer state kept for each weight."""
    state = dict(training.optimizer.state)
    for path, module in training.model.named_modules():
        for tensor in _module_tensors(module):
            yield path, tensor
            yield from ((path, state_tensor) for state_tensor in tensors_in(state.get(tensor)))


def module_paths(training: Owner) -> dict[int, str]:
    """The module path of each tensor of `owned_tensors`, by the tensor's id; the first of a shared weight."""
    paths: dict[int, str] = {}
    for path, tensor in owned_tensors(training):
        paths.setdefault(id(tensor), path)
    return paths


def model_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Every tensor the model keeps: parameters, buffers, quantization scales and code tables."""
    for module in model.modules():
        yield from _module_tensors(module)


def _module_tensors(module: nn.Module) -> Iterator[Tensor]:
    """The tensors that one module keeps itself, without those of its children."""
    yield from (buffer for buffer in module._buffers.values() if buffer is not None)
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        yield parameter
        yield from tensors_in(getattr(parameter, "quant_state", None))  # bitsandbytes 4-bit
        yield from tensors_in([getattr(parameter, name, None) for name in ("CB", "SCB")])  # and int8
    yield from tensors_in(getattr(module, "quant_state", None))  # 4-bit experts (parametrization)
    yield from tensors_in([getattr(getattr(module, "state", None), name, None) for name in ("CB", "SCB")])


@contextmanager
def gradients_seen(training: Owner | None, phase: str, seen: Callable[[Tensor], None]) -> Iterator[None]:
    """Inside, if `phase` is backward, `seen(weight)` is called whenever a trained weight's gradient is
    complete.

    For a weight that is stepped in backward it is called just before: the older hook that steps it frees the
    gradient.
    """

    def hook(weight: Tensor) -> None:
        if weight.grad is not None:
            seen(weight)

    def stepping(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                hook(weight)

    handles: list[RemovableHandle] = []
    if training is not None and phase == "backward":
        handles.append(register_optimizer_step_pre_hook(stepping))
        leaves = (p for p in training.model.parameters() if p.requires_grad and p.is_leaf)
        handles += [parameter.register_post_accumulate_grad_hook(hook) for parameter in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested dicts and lists, and in the objects that optimizers and quantization keep."""
    if type(value).__name__ in ("OptimState8bit", "OptimState4bit"):  # torchao's, which are tensors too
        yield from (value.codes, value.scale, value.qmap)
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif type(value).__name__ == "QuantState":
        yield from tensors_in([value.absmax, value.code, value.offset, value.state2])
    elif type(value).__name__ in ("GaLoreProjector", "GradientProjector"):  # of GaLore and APOLLO
        yield from tensors_in(value.ortho_matrix)
