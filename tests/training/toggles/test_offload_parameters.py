"""offload_parameters: the same numbers as without it, and only what is in use on the device."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from harness.errors import InputError
from harness.observe.storage_tracker import StorageTracker
from harness.training.host_memory import SideStream, is_on_host, on_host
from harness.training.loop import set_up
from harness.training.toggles.offload_parameters import (
    _cast_by_autocast,
    _DeviceCopies,
    _Group,
    built_where,
    offload_parameters,
)
from tests.support.tiny import CPU, NullObserver, built, same_bits, tiny, train, weights

CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "tied head": {"family": "gpt2"},  # with biases and transposed linear layers
    "bf16": {"precision": "bf16"},
    "checkpointing": {"gradient_checkpointing": True},
    "accumulation": {"gradient_accumulation_steps": 3},
    "clipping": {"max_grad_norm": 0.1},
    "lora": {"adapter": "lora", "precision": "bf16"},
    "lora, checkpointing": {
        "adapter": "lora",
        "precision": "bf16",
        "gradient_checkpointing": True,
        "gradient_accumulation_steps": 2,
    },
    "ia3": {"adapter": "ia3", "precision": "bf16", "max_grad_norm": 0.1},
    "autocast": {"precision": "bf16-mixed"},
    "autocast, tied, checkpointing": {
        "family": "gpt2",
        "precision": "bf16-mixed",
        "gradient_checkpointing": True,
        "gradient_accumulation_steps": 2,
    },
    "autocast, lora": {"precision": "bf16-mixed", "adapter": "lora"},
    "experts": {"family": "mixtral", "gradient_checkpointing": True},  # weights of three dimensions
}


class TwoMemories(TorchDispatchMode):
    """Makes the CPU refuse what a GPU machine refuses: an operator over host and device tensors at once.

    A storage is on the host if it was made inside `on_host()` or out of host tensors.
    """

    MAY_CROSS = (torch.ops.aten.copy_.default,)

    def __init__(self) -> None:
        super().__init__()
        self.host: set[int] = set()
        self.device: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        used = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        from_host = [t for t in used if self.where(t) is self.host]
        made_alike = func in (torch.ops.aten.empty_like.default, torch.ops.aten.empty.memory_format)
        out = func(*args, **(kwargs or {}))
        if not made_alike and func not in self.MAY_CROSS:
            from_device = [t for t in used if self.where(t) is self.device]
            # a GPU takes scalars from the host
            mixed = from_device and any(t.dim() > 0 for t in from_host)
            assert not mixed, f"{func} mixes host and device tensors"
        on_the_host = is_on_host() if made_alike else bool(from_host)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and self.where(tensor) is None:
                self.put(tensor, self.host if on_the_host else self.device)
        return out

    def where(self, tensor: Tensor) -> set[int] | None:
        address = tensor.untyped_storage()._cdata
        return self.host if address in self.host else self.device if address in self.device else None

    def put(self, tensor: Tensor, memory: set[int]) -> None:
        storage = tensor.untyped_storage()
        memory.add(storage._cdata)
        weakref.finalize(storage, memory.discard, storage._cdata)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_same_losses_and_weights_to_the_bit_out_of_host_memory(fields: dict[str, Any]) -> None:
    here = train(tiny(**fields), 2)
    with TwoMemories() as memories:
        there = train(tiny(**fields, offload=["parameters"]), 2)
        training = there.training
        assert all(memories.where(p) is memories.host for p in training.model.parameters())
        state = [t for s in training.optimizer.state.values() for t in s.values() if t.dim() > 0]
        assert state
        assert all(memories.where(t) is memories.host for t in state)
    assert there.losses == here.losses
    assert same_bits(weights(training), weights(here.training))


class LateStream:
    """A side stream as far behind as it may be: what is copied in it is there once somebody waits for it."""

    def __init__(self) -> None:
        self.queued: list[tuple[Tensor, Tensor]] = []
        self.waited = 0

    def __enter__(self) -> None:
        def queue(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            self.queued.append((target, source))
            return target.fill_(float("nan"))  # what is in memory that nobody has written

        Tensor.copy_ = queue  # type: ignore[method-assign, assignment]

    def __exit__(self, *_: object) -> None:
        del Tensor.copy_  # Tensor has what it inherits again

    def wait_stream(self, other: "LateStream") -> None:
        """This stream goes on after all that was queued in the other."""
        self.waited += bool(other.queued)
        for target, source in other.queued:
            target.copy_(source)
        other.queued.clear()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["full", "lora, checkpointing", "autocast"])
def test_nothing_is_used_before_it_has_arrived(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = CASES[name]
    here = train(tiny(**fields), 2)
    side, compute = LateStream(), LateStream()
    monkeypatch.setattr(
        SideStream, "__init__", lambda self, device: vars(self).update(_device=device, _stream=side)
    )
    monkeypatch.setattr(torch.accelerator, "current_stream", {CPU: compute}.get)  # of this device, no other
    there = train(tiny(**fields, offload=["parameters"]), 2)
    assert there.losses == here.losses
    assert compute.waited > 0
    assert same_bits(weights(there.training), weights(here.training))


class Sink:
    """Follows storages: those of WEIGHT_BYTES alive on the device, and every event."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.alive = 0
        self.most = 0

    def born(self, key: int, size_bytes: int, on_host: bool, op: str, frames: Any, *_: Any) -> None:
        self.events.append(("born", size_bytes, on_host, op))
        if size_bytes == WEIGHT_BYTES and not on_host:
            self.alive += 1
            self.most = max(self.most, self.alive)

    def died(self, key: int, size_bytes: int, on_host: bool) -> None:
        self.events.append(("died", size_bytes, on_host))
        if size_bytes == WEIGHT_BYTES and not on_host:
            self.alive -= 1

    def take_most(self) -> int:
        most, self.most = self.most, self.alive
        return most


WIDTH = 24
WEIGHT_BYTES = WIDTH * WIDTH * 4
BLOCKS = 6


class Stack(nn.Module):
    """Blocks of one square weight each; nothing else is as large."""

    def __init__(self, checkpointed: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(width)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            # around __call__, so recomputation runs the block's hooks again (older transformers do this)
            call = partial(checkpoint, layer, use_reentrant=False) if self.checkpointed else layer
            x = torch.tanh(call(x))
        return self.norm(x).sum()


@contextmanager
def offloaded_stack(
    device: torch.device = CPU, dtype: torch.dtype | None = None, **kwargs: Any
) -> Iterator[tuple[nn.Module, Sink]]:
    sink = Sink()
    with StorageTracker(sink):
        with on_host(), device:
            torch.manual_seed(0)
            model = Stack(**kwargs)
        offload_parameters(model, device, dtype)
        sink.take_most()
        yield model, sink


@pytest.mark.parametrize("checkpointed", [False, True])
def test_two_blocks_on_the_device_in_forward_and_a_gradient_in_backward(checkpointed: bool) -> None:
    with offloaded_stack(checkpointed=checkpointed) as (model, sink):
        for _ in range(2):
            sink.take_most()
            loss = model(torch.ones(2, WIDTH))
            assert sink.take_most() == 2  # the block in use and the next one
            assert sink.alive == 0  # autograd holds no weight
            loss.backward()
            assert sink.take_most() == 3  # and the block's gradient
            assert sink.alive == 0
            assert all(p.grad is not None for p in model.parameters())


def test_frozen_blocks_leave_no_weights_behind() -> None:
    with offloaded_stack() as (model, sink):
        model.requires_grad_(False)
        model.layers[2].requires_grad_(True)  # backward stops here, having sent for block 1
        model(torch.ones(2, WIDTH)).backward()

        assert sink.alive == 0
        assert [p.grad is not None for p in model.layers.parameters()] == [i == 2 for i in range(BLOCKS)]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_shape_only_tensors_are_allocated_like_real_ones(checkpointed: bool) -> None:
    events = []
    for device in (CPU, torch.device("meta")):
        with offloaded_stack(device, checkpointed=checkpointed) as (model, sink):
            del sink.events[:]
            for _ in range(2):
                model(torch.ones(2, WIDTH, device=device)).backward()
            events.append(list(sink.events))
    assert events[0] == events[1]
    assert len(events[0]) > 100


@pytest.mark.parametrize(
    ("autocast_dtype", "kept"),
    [
        (None, BLOCKS - 1),  # autograd keeps every cast but the first block's, whose input needs no gradient
        (torch.bfloat16, 0),
    ],
)
def test_casts_under_autocast_leave_with_their_weights(autocast_dtype: torch.dtype | None, kept: int) -> None:
    with offloaded_stack(dtype=autocast_dtype) as (model, sink):
        with torch.autocast("cpu", torch.bfloat16):
            model_output = model(torch.ones(2, WIDTH))
        casts = [event[0] for event in sink.events if event[1] == WEIGHT_BYTES // 2]
        assert casts.count("born") == BLOCKS
        assert casts.count("born") - casts.count("died") == kept
        model_output.backward()


def test_a_gradient_is_cast_on_the_device_as_a_gpu_does() -> None:
    """What a GPU copies to a host tensor of another dtype it casts first, in memory of its own."""
    with offloaded_stack(dtype=torch.bfloat16) as (model, sink):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(torch.ones(2, WIDTH))
        del sink.events[:]
        output.backward()
        assert sink.events.count(("born", WEIGHT_BYTES, False, "_to_copy")) == BLOCKS


def test_every_matrix_that_autocast_would_cast_is_cast_on_arrival() -> None:
    """GPT-2's transposed layers too: four in each of two blocks. Its head is tied, and stays in fp32."""
    model = built(tiny("gpt2"))[0].model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [names[id(parameter)] for parameter in _cast_by_autocast(model)]
    assert sorted(found) == sorted(
        f"transformer.h.{block}.{layer}.weight"
        for block in range(2)
        for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    )


def test_what_is_left_is_dropped_once_after_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[int] = []
    finish = _DeviceCopies._finish
    monkeypatch.setattr(_DeviceCopies, "_finish", lambda self: (dropped.append(1), finish(self))[1])
    with offloaded_stack() as (model, _):
        loss = model(torch.ones(2, WIDTH))
        assert len(dropped) == 1  # what the pass before may have left
        loss.backward()
        assert len(dropped) == 2


def test_with_offloaded_activations() -> None:
    with TwoMemories():
        losses = train(tiny(offload=["parameters", "activations"]), 2).losses
    assert losses == train(tiny(), 2).losses


def test_hooks_that_were_there_find_the_weights_in_place() -> None:
    model, found = Stack(), list[bool]()
    for module, weight in ((model, model.norm.weight), (model.layers[0], model.layers[0].weight)):
        owner = model.norm if module is model else module
        module.register_forward_pre_hook(
            lambda *_, owner=owner, weight=weight: found.append(owner.weight is weight)
        )
    offload_parameters(model, CPU)
    model(torch.ones(2, WIDTH))
    assert found == [False, False]


def test_copies_are_made_on_the_device() -> None:
    copies = _DeviceCopies(torch.device("meta"), _Group(), [], [])
    assert copies._empty(nn.Parameter(torch.zeros(2))).device.type == "meta"


def test_an_error_in_forward_puts_the_weights_back() -> None:
    with offloaded_stack() as (model, sink):
        host = list(model.parameters())
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, WIDTH + 1))
        assert list(model.parameters()) == host
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        model(torch.ones(2, WIDTH)).backward()
        assert sink.alive == 0


def test_without_gradients() -> None:
    with offloaded_stack() as (model, sink):
        with torch.no_grad():
            evaluated = model(torch.ones(2, WIDTH))
        assert sink.alive == 0
        assert evaluated == model(torch.ones(2, WIDTH)).detach()


def test_buffers_are_on_the_device() -> None:
    model = Stack()
    model.register_buffer("scale", torch.arange(3.0))
    with TwoMemories() as memories:
        offload_parameters(model, CPU)
        assert memories.where(model.scale) is memories.device
    assert model.scale.tolist() == [0, 1, 2]


@pytest.mark.parametrize("device", ["cuda", "cpu", "meta"])
def test_a_model_larger_than_a_gpu_is_built_in_host_memory(device: str) -> None:
    with built_where(tiny(offload=["parameters"]), torch.device(device)) as there:
        assert there.type == ("cpu" if device == "cuda" else device)
        assert is_on_host()
    with built_where(tiny(), torch.device(device)) as there:
        assert there.type == device
        assert not is_on_host()


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(InputError, match=r"offload: \[parameters\].*no nn.ModuleList"):
        offload_parameters(nn.Linear(2, 2), CPU)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_gpu_same_gradients_in_pinned_host_memory(fields: dict[str, Any]) -> None:
    device, start = torch.device("cuda"), dict[str, Tensor]()
    losses, gradients = [], []
    for offload in ([], ["parameters"]):
        training, _ = set_up(tiny(**fields, offload=offload), device, NullObserver())
        model = training.model
        start = start or {name: weight.detach().clone() for name, weight in model.named_parameters()}
        model.load_state_dict(start, strict=False)
        ids = torch.randint(0, 264, (2, 12), generator=torch.Generator().manual_seed(1)).to(device)
        with training.autocast():
            losses.append(model(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
        gradients.append([weight.grad for weight in model.parameters() if weight.requires_grad])
    assert all(p.is_pinned() for p in model.parameters())
    assert all(gradient.is_pinned() for gradient in gradients[1])
    torch.testing.assert_close(losses[1], losses[0])
    for ours, theirs in zip(*gradients[::-1], strict=True):
        torch.testing.assert_close(ours, theirs.cpu())


@pytest.mark.gpu
def test_gpu_holds_two_blocks_and_a_gradient() -> None:
    device, width = torch.device("cuda"), 2048
    model = Stack(width=width)
    offload_parameters(model, device)
    x = torch.ones(1, width, device=device)
    model(x).backward()  # cuBLAS takes its workspace
    model.zero_grad()
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    model(x).backward()

    weight_bytes = width * width * 4
    extra_bytes = torch.cuda.max_memory_allocated() - before_bytes
    assert 3 * weight_bytes <= extra_bytes < 3.1 * weight_bytes
