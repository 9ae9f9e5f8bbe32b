"""offload: activations and optimizer. Nothing changes but where the bytes are."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from harness.training.toggles.offload_activations import IN_FLIGHT, MIN_OFFLOAD_BYTES, OffloadedActivations
from tests.support.tiny import ByteObserver, NullObserver, built, same_bits, step, tiny, train, weights
from tests.training.toggles.test_precision import PARAMETERS, TENSORS

SETTINGS: list[dict[str, Any]] = [
    {},
    {"precision": "bf16"},
    {"gradient_checkpointing": True},
    {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
    {"adapter": "lora", "lora_dropout": 0.5},
    {"adapter": "lora", "quantization": "nf4", "precision": "bf16"},
]


def observed_step(steps: int = 1, **fields: Any) -> tuple[ByteObserver, list[int]]:
    """What the last of `steps` steps allocated, and the sizes of what forward left on the device."""
    observer = ByteObserver()
    training, batches = built(tiny(seq_len=32, **fields), observer)
    for _ in range(steps):
        before = set(observer.live)
        left: list[int] = []

        def look(before: set[int] = before, left: list[int] = left) -> None:
            left.extend(size for key, size in observer.live.items() if key not in before)

        observer.beginning["backward"] = look
        step(training, batches, observer)
    return observer, left


@pytest.mark.parametrize("fields", SETTINGS)
@pytest.mark.parametrize("what", ["activations", "optimizer"])
def test_offload_changes_no_bit(what: str, fields: dict[str, Any]) -> None:
    here = train(tiny(seq_len=32, **fields), 4)
    away = train(tiny(seq_len=32, offload=[what], **fields), 4)
    assert away.losses == here.losses
    assert same_bits(weights(away.training), weights(here.training))


@pytest.mark.parametrize("fields", SETTINGS)
def test_checkpoints_wait_on_the_host_and_change_no_bit(fields: dict[str, Any]) -> None:
    fields = {**fields, "gradient_checkpointing": True}
    here, away = (train(tiny(seq_len=32, offload=where, **fields), 4) for where in ((), ("checkpoints",)))
    assert away.losses == here.losses
    assert same_bits(weights(away.training), weights(here.training))


def test_what_is_on_the_host_are_the_inputs_of_both_blocks() -> None:
    fields = {"gradient_checkpointing": True}
    here, here_left = observed_step(**fields)
    away, away_left = observed_step(**fields, offload=["checkpoints"])
    inputs = 2 * 2 * 32 * 64 * 4  # blocks, rows, tokens, numbers of 4 bytes
    assert sum(here_left) - sum(away_left) == away.host_peak_bytes == inputs
    assert (away.host_bytes, here.host_peak_bytes) == (0, 0)


@pytest.mark.parametrize("fields", [s for s in SETTINGS if "gradient_accumulation_steps" not in s])
def test_activations_wait_for_backward_on_the_host(fields: dict[str, Any]) -> None:
    here, here_left = observed_step(**fields)
    away, away_left = observed_step(**fields, offload=["activations"])
    assert any(size >= MIN_OFFLOAD_BYTES for size in here_left)
    assert sum(size >= MIN_OFFLOAD_BYTES for size in away_left) <= IN_FLIGHT
    assert 0 < sum(here_left) - sum(away_left) <= away.host_peak_bytes
    assert away.peak_bytes["forward"] < here.peak_bytes["forward"]
    if "gradient_checkpointing" not in fields:  # there the peak is one block's own activations
        assert away.peak_bytes["backward"] < here.peak_bytes["backward"]
    assert (away.host_bytes, here.host_peak_bytes) == (0, 0)


def test_activations_are_gone_from_the_host_before_the_optimizer_steps() -> None:
    observer = ByteObserver()
    training, batches = built(tiny(seq_len=32, offload=["activations"]), observer)
    seen: list[int] = []
    observer.beginning = {
        "backward": lambda: seen.append(observer.host_bytes),
        "optimizer_step": lambda: seen.append(observer.host_bytes),
    }
    step(training, batches, observer)
    assert seen[0] > 0
    assert seen[1] == 0


@pytest.mark.parametrize(
    ("fields", "bytes_per_parameter"),
    [
        ({}, 4 + 4 + 4),  # a copy and both moments in fp32
        ({"precision": "bf16"}, 2 + 2 + 2),
        ({"precision": "bf16", "master_weights": True}, 4 + 4 + 4),
        ({"precision": "bf16-mixed"}, 4 + 4 + 4),
        ({"optimizer": "sgd"}, 4),
    ],
)
def test_the_optimizer_and_its_state_are_on_the_host(
    fields: dict[str, Any], bytes_per_parameter: int
) -> None:
    observer = ByteObserver()
    training, batches = built(tiny(offload=["optimizer"], **fields), observer)
    model_bytes = observer.allocated_bytes
    step(training, batches, observer)
    counter_bytes = 0 if fields.get("optimizer") == "sgd" else 4  # AdamW counts a tensor's steps in fp32
    assert observer.host_bytes == bytes_per_parameter * PARAMETERS + counter_bytes * TENSORS
    assert observer.allocated_bytes == model_bytes


def test_stepping_on_the_host_needs_no_device_memory() -> None:
    """At most weights and gradients are on the device while AdamW steps, not the moments and temporaries."""
    observer, _ = observed_step(steps=2, offload=["optimizer"])
    at_rest = observer.end_bytes["optimizer_step"]
    assert observer.peak_bytes["optimizer_step"] - at_rest <= 4 * PARAMETERS


class FakeStream:
    """Runs everything at once, as a side stream that is never behind, and notes what was waited for."""

    def __init__(self) -> None:
        self.recorded = 0
        self.waited: list[int] = []

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def wait_stream(self, other: object) -> None: ...

    def record_event(self) -> int:
        self.recorded += 1
        return self.recorded

    def wait_event(self, event: int) -> None:
        self.waited.append(event)


@pytest.mark.parametrize("fields", SETTINGS)
def test_the_side_stream_brings_back_the_same_bits(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of copies on a GPU, on the CPU: the compute stream waits for each of them, once."""
    here = train(tiny(seq_len=32, **fields), 2)
    training, batches = built(tiny(seq_len=32, offload=["activations"], **fields))
    offloaded = training.saved_tensors
    assert isinstance(offloaded, OffloadedActivations)
    side, compute = FakeStream(), FakeStream()
    offloaded._side._stream = side  # type: ignore[assignment]
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: compute)
    losses, in_flight = [], []

    def look() -> None:
        in_flight.append(len(offloaded._leaving))

    for _ in range(2):
        losses.append(step(training, batches, NullObserver(backward=look)).item())
        assert (offloaded._leaving, offloaded._fetched) == ([], {})
    assert losses == here.losses
    assert same_bits(weights(training), weights(here.training))
    assert set(in_flight) == {IN_FLIGHT}
    assert sorted(compute.waited) == list(range(1, side.recorded + 1))


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("laid_out", ["expanded", "every other"])
def test_what_is_not_dense_comes_back_with_its_values(laid_out: str, rows: int) -> None:
    """A mask is expanded to every head: it is kept once."""
    columns = MIN_OFFLOAD_BYTES // 4

    def gradients(offloaded: OffloadedActivations | None) -> tuple[torch.Tensor, torch.Tensor, set[int]]:
        torch.manual_seed(0)
        mask = torch.randn(1 if laid_out == "expanded" else 2 * rows, columns, requires_grad=True)
        scores = torch.randn(rows, columns, requires_grad=True)
        view = mask.expand(rows, columns) if laid_out == "expanded" else mask[::2]
        with nullcontext() if offloaded is None else offloaded():
            out = (view * scores).sum()
        found = [] if offloaded is None else [saved() for saved in offloaded._saved]
        sizes = {saved.host.shape[0] for saved in found if saved is not None}
        out.backward()
        assert mask.grad is not None
        assert scores.grad is not None
        return mask.grad, scores.grad, sizes

    *plain, _ = gradients(None)
    model = torch.nn.Linear(1, 1)
    *ours, sizes = gradients(OffloadedActivations(model, torch.device("cpu")))
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    assert sizes == ({1, rows} if laid_out == "expanded" else {rows})


def test_weights_and_what_is_small_stay() -> None:
    """A product keeps its input and its weight."""
    width = 64
    model = torch.nn.Linear(width, width, bias=False)
    assert model.weight.nbytes > MIN_OFFLOAD_BYTES == 16 * width * 4
    for rows, leaving in ((15, 0), (16, 1)):
        offloaded = OffloadedActivations(model, torch.device("cpu"))
        with offloaded():
            out = model(torch.randn(rows, width, requires_grad=True))
        assert len(offloaded._saved) == leaving
        out.sum().backward()
