"""The toggle `offload: [parameters]`: weights, gradients and optimizer state live in host memory, and the
weights of one block at a time are on the device.

Before a transformer block runs, its weights are copied to the device and take the places of the host's in its
modules; after it they are dropped. Autograd saves only which weight it needs, and backward copies the weight
to the device again. The gradients go to the host when their block is done. While a block runs, the next one's
weights are copied (on a GPU on a side stream, from pinned memory). The root (final norm, output head, and an
embedding tied to it) is a group of its own: it is on the device for the whole forward pass, its weights are
fetched one by one in backward, and its gradients go last.

FSDP2 (`fully_shard` with CPUOffloadPolicy) does this on many devices. On one it computes the same numbers,
but (torch 2.13) it fetches no weight ahead: `FSDPParamGroup.unshard` does nothing where the world size is 1,
and the copies wait in the compute stream. It needs more memory (two flat buffers of a block's gradients, and
the root from forward to the end of backward), and under autocast it keeps the 16-bit casts of all weights
from forward to backward. Here the device's allocations are the same, in the same order, on a GPU, on a CPU
and on shape-only tensors. FSDP2 does one thing better: its gradients go to the host on a side stream, and
here backward waits for them.

When weights of a model with two blocks are on the device (==) or on their way (..); time goes to the right:

                 forward                        backward
    root         begin ================ end     ====
    embedding          ..==                                          (it saves no weight)
    block 1              ..======                   ........======
    block 2                ......======         ....========
    gradients                                               block 2's, then block 1's, the root's: to the host

A group's == begins with `before` and ends with `leave`. In backward it begins with `_before_backward`, which
the gradient of a block's output calls, or with `_unpack`, for a tensor that autograd saved. `_finish`, after
backward, drops what is left.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from harness.errors import InputError
from harness.parallel import DTYPES, blocks_of
from harness.recipe import Recipe
from harness.training.host_memory import SideStream, on_host


@contextmanager
def built_where(recipe: Recipe, device: torch.device) -> Iterator[torch.device]:
    """Yields the device to build on: the host for an offloaded model, which may be larger than a GPU."""
    if not recipe.parameters_on_host:
        yield device
        return
    with on_host():
        yield torch.device("cpu") if device.type == "cuda" else device


def parameters_to_host(recipe: Recipe, model: nn.Module, device: torch.device) -> None:
    """Offload the model's parameters if the recipe has `offload: [parameters]`."""
    if recipe.parameters_on_host:
        offload_parameters(model, device, DTYPES[recipe.compute_dtype] if recipe.mixed else None)


def offload_parameters(
    model: nn.Module, device: torch.device, autocast_dtype: torch.dtype | None = None
) -> None:
    """Move the weights of `model` to host memory, and have every forward and backward pass fetch them.

    Buffers move to `device` (cuda, cpu or meta), where the model computes. The weights may be on any device;
    a model that is larger than the device is to be built in host memory. Adapters and gradient checkpointing
    must be in place. The parameters stay the same objects, so the optimizer may be built before or after.
    `autocast_dtype` is the dtype of the autocast that the model will run under: the fp32 weights of linear
    layers are cast to it on arrival, as autocast would cast them, so that the casts are dropped as well.
    (Three-dimensional weights of experts are not, and their casts live until backward.)

    Raises InputError for a model without an nn.ModuleList of blocks.
    """
    blocks = [block for blocks in blocks_of(model) for block in blocks]
    if not blocks:
        raise InputError(
            "offload: [parameters] moves one transformer block at a time, and this model has none "
            "(no nn.ModuleList of blocks). Take parameters out of offload."
        )
    for parameter in model.parameters():
        parameter.data = _host_copy(parameter, parameter.detach(), device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device).copy_(buffer)

    in_blocks = {module for block in blocks for module in block.modules()}
    outside = [module for module in model.modules() if module not in in_blocks]
    root = _group(outside)
    embeddings = {m: _group([m]) for m in outside if isinstance(m, nn.Embedding) and not root.shares(m)}
    for group in embeddings.values():
        root.places = {p: places for p, places in root.places.items() if p not in group.places}
    groups = {block: _group(block.modules()) for block in blocks}
    copies = _DeviceCopies(device, root, [*embeddings.values()], [*groups.values()])
    if autocast_dtype is not None:
        copies.dtypes = dict.fromkeys(_cast_by_autocast(model), autocast_dtype)
    model.register_forward_pre_hook(copies.begin, prepend=True)
    model.register_forward_hook(copies.end, always_call=True)
    for module, group in (embeddings | groups).items():
        module.register_forward_pre_hook(partial(copies.before, group), prepend=True)
        # always_call: recomputation under gradient checkpointing leaves a block by an exception
        after = copies.after_embedding if module in embeddings else copies.after_block
        module.register_forward_hook(partial(after, group), always_call=True)


@dataclass(eq=False)
class _Group:
    """Weights that are copied together, each with the modules and the attribute names that have it."""

    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = field(default_factory=dict)

    def shares(self, module: nn.Module) -> bool:
        """Whether another module shares a parameter of `module`, as a head that an embedding is tied to."""
        return any(len(self.places[parameter]) > 1 for parameter in module.parameters(recurse=False))


class _Saved(NamedTuple):
    """What autograd keeps in place of a weight that it saves: which weight, and which view of it."""

    group: _Group
    parameter: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _DeviceCopies:
    """The weights that are on the device: those of the group in use, and of the one that comes next."""

    def __init__(
        self, device: torch.device, root: _Group, embeddings: list[_Group], blocks: list[_Group]
    ) -> None:
        self.device = device
        self.root = root
        self.dtypes: dict[nn.Parameter, torch.dtype] = {}
        self._forward_order = dict(pairwise([root, *embeddings, *blocks]))
        self._backward_order = dict(pairwise([root, *reversed(blocks)]))
        self._next = self._forward_order
        self._current: _Group | None = None
        self._copies: dict[nn.Parameter, Tensor] = {}
        self._in_place: dict[_Group, dict[int, nn.Parameter]] = {}  # by storage, by which `_pack` knows them
        self._will_finish = False
        self._side = SideStream(device)

    def begin(self, model: nn.Module, args: Any) -> None:
        """Before the model's forward: the root arrives, and from now on autograd saves no weights."""
        self._finish()  # the optimizer has stepped the host's weights since
        self._next = self._forward_order
        # autograd calls only the innermost hooks, so these call the ones in effect (activation offload)
        outside = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
        keep, give_back = outside or (lambda tensor: tensor, lambda kept: kept)
        self._hooks = saved_tensors_hooks(partial(self._pack, keep), partial(self._unpack, give_back))
        self._hooks.__enter__()
        self._place(self.root)

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        """After the model's forward: backward uses the groups in the opposite order."""
        self._hooks.__exit__()
        self.leave(self.root)
        self._current, self._next = None, self._backward_order

    def before(self, group: _Group, module: nn.Module, args: Any) -> None:
        """Before the forward of a block or an embedding: its weights arrive and take their places."""
        self._place(group)

    def after_embedding(self, group: _Group, module: nn.Module, args: Any, output: Any) -> None:
        """After an embedding's forward: its weights are dropped for good, since its backward needs none."""
        self.leave(group)

    def after_block(self, group: _Group, module: nn.Module, args: Any, output: Any) -> None:
        """After a block's forward, however it ended: its weights leave, and return before its backward."""
        self.leave(group)
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, group))

    def _before_backward(self, group: _Group, gradient: Tensor) -> None:
        # recomputation under gradient checkpointing calls the block's forward without its hooks (in newer
        # transformers), so the weights must be in place, and require gradients as they did
        for other in [other for other in self._in_place if other is not group]:
            self.leave(other)
        self._finish_after_backward()
        with torch.enable_grad():
            self._place(group)

    def leave(self, group: _Group) -> None:
        """Put the host's weights of the group back in their places, and free the copies."""
        if self._in_place.pop(group, None) is not None:
            for parameter, places in group.places.items():
                for module, name in places:
                    module._parameters[name] = parameter
        self._drop_all_but([parameter for parameter in self._copies if parameter not in group.places])

    def _place(self, group: _Group) -> None:
        weights = self._take(group, group.places)
        self._in_place[group] = {}
        for (parameter, places), weight in zip(group.places.items(), weights, strict=True):
            self._in_place[group][weight.untyped_storage()._cdata] = parameter
            if parameter.requires_grad and torch.is_grad_enabled():
                weight = _Arrival.apply(parameter, weight)
            for module, name in places:
                module._parameters[name] = weight  # type: ignore[assignment]

    def _finish_after_backward(self) -> None:
        if not self._will_finish:
            self._will_finish = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # type: ignore[attr-defined]

    def _finish(self) -> None:
        for group in list(self._in_place):
            self.leave(group)
        self._drop_all_but(())
        self._current, self._will_finish = None, False

    def _take(self, group: _Group, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """The copies on the device of `parameters`, which are of `group`, ready for use. The first call for a
        group also begins to copy the next group."""
        entered = group is not self._current
        if entered:
            self._current = group
            self._drop_all_but(group.places)
        for parameter in parameters:
            if parameter not in self._copies:
                self._copies[parameter] = self._empty(parameter)
                self._copies[parameter].copy_(parameter.detach(), non_blocking=True)
            self._copies[parameter] = self._copies[parameter].to(self._dtype(parameter))
        if entered and group in self._next:
            self._send_for(self._next[group])
        return [self._copies[parameter] for parameter in parameters]

    def _send_for(self, group: _Group) -> None:
        absent = [parameter for parameter in group.places if parameter not in self._copies]
        self._copies |= {parameter: self._empty(parameter) for parameter in absent}
        with self._side.after_compute():
            for parameter in absent:
                self._copies[parameter].copy_(parameter.detach(), non_blocking=True)

    def _drop_all_but(self, kept: Iterable[nn.Parameter]) -> None:
        self._side.compute_waits_for_all()  # no copy may be used or freed before it has arrived
        self._copies = {parameter: self._copies[parameter] for parameter in kept if parameter in self._copies}

    def _empty(self, parameter: nn.Parameter) -> Tensor:
        return torch.empty_like(parameter, device=self.device, requires_grad=False)

    def _pack(self, keep: Any, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()._cdata
        for group, weights in self._in_place.items():
            parameter = weights.get(storage)
            if parameter is not None and tensor.dtype == self._dtype(parameter):
                return _Saved(group, parameter, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return keep(tensor)

    def _unpack(self, give_back: Any, saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            return give_back(saved)
        self._finish_after_backward()
        [weight] = self._take(saved.group, [saved.parameter])
        return weight.as_strided(saved.size, saved.stride, saved.offset)

    def _dtype(self, parameter: nn.Parameter) -> torch.dtype:
        return self.dtypes.get(parameter, parameter.dtype)


class _Arrival(torch.autograd.Function):
    """Makes the device's copy a result of the host's parameter, so that the gradient goes back to the host.

    The parameter's gradient is set here: autograd itself would add gradients up in device memory where both
    are shape-only. The node is older than every operator of its group, and autograd runs the youngest node
    first, so all gradients of a group go to the host together, when the group's backward is over.
    """

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, weight: Tensor) -> Tensor:
        ctx.parameter = parameter
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        parameter: nn.Parameter = ctx.parameter
        arrived = _host_copy(parameter, gradient.to(parameter.dtype), gradient.device)
        if parameter.grad is None:
            parameter.grad = arrived
        else:
            parameter.grad.add_(arrived)
        return None, None


def _host_copy(like: Tensor, source: Tensor, device: torch.device) -> Tensor:
    """A copy of `source` in host memory, with the layout of `like`, pinned if `device` is a GPU. It is
    complete when this returns."""
    shape_only = device.type == "meta"
    with on_host():
        host = torch.empty_like(
            like,
            device="meta" if shape_only else "cpu",
            pin_memory=device.type not in ("cpu", "meta"),
            requires_grad=False,
        )
        return host.copy_(source)


def _group(modules: Iterable[nn.Module]) -> _Group:
    """The group of all parameters that `modules` themselves have."""
    group = _Group()
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                group.places.setdefault(parameter, []).append((module, name))
    return group


def _cast_by_autocast(model: nn.Module) -> Iterator[nn.Parameter]:
    """The fp32 matrices of linear layers. Left to autocast are adapters, which are small, and whose layers
    choose a dtype by theirs; and a tied output head, which the embedding reads in fp32."""
    embedded = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, module in model.named_modules():
        # Conv1D: transformers' transposed linear layer (GPT-2)
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and "lora_" not in name:
            weight = module.weight
            if isinstance(weight, nn.Parameter) and weight.dtype == torch.float32 and weight not in embedded:
                yield weight
