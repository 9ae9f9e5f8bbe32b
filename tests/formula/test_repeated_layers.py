"""What three shallow models ask for says what a deep one asks for: request by request, or not at all."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.allocator import Allocator, parse_settings
from harness.formula import NotRepeated, Piece, Point, RepeatedLayers, RequestLog
from harness.formula.request_log import all_blocks, settled
from harness.hardware import find_hardware
from harness.simulate import SimulatedMemory
from harness.simulate.simulated_run import simulate_for_devices
from tests.support.long import long
from tests.support.places import MODELS
from tests.support.tiny import tiny

H100 = find_hardware("h100")
LORA = {"adapter": "lora", "gradient_checkpointing": True}
OTHERS: list[dict[str, Any]] = [
    {**LORA, "quantization": "nf4", "lora_dropout": 0.1},
    {"precision": "fp16-mixed", "max_grad_norm": 1.0, "optimizer": "adafactor"},
    {"optimizer_in_backward": True, "max_grad_norm": None, "offload": ["activations"]},
    {"parallel": "fsdp", "dp_shard": 4, "gradient_accumulation_steps": 2},
    {"parallel": "tp", "tp": 2},
]
DEEP = 9
MIB = 2**20


def simulated(folder: Path, layers: int, family: str = "llama", **fields: Any) -> SimulatedMemory:
    config = json.loads((MODELS / f"{family}.json").read_bytes()) | {"num_hidden_layers": layers}
    path = folder / f"{layers}.json"
    path.write_text(json.dumps(config))
    recipe = tiny(family, **{"precision": "bf16", "seq_len": 64, **fields}).model_copy(
        update={"model": str(path)}
    )
    return simulate_for_devices(recipe, [H100], parse_settings("", "2.13.0"))[1]


def in_order(log: RequestLog) -> tuple[list[int], list[tuple[int, int]], list[Any]]:
    """Events with keys counted from 0, in the order of birth, and the size and stream of each birth."""
    births = [(size, stream) for _, size, stream in log.events if size >= 0]
    return settled(log.numbered(), log.marks), births, log.marks


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("mixtral", LORA),
        *(pytest.param("llama", fields, marks=long) for fields in OTHERS),
    ],
    ids=str,
)
def test_requests_of_a_deep_model_are_those_of_its_own_simulation(
    tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    few, more, most = (simulated(tmp_path, layers, family, **fields) for layers in (4, 5, 6))
    whole = simulated(tmp_path, DEEP, family, **fields)
    log, alike = RepeatedLayers([few.log, more.log, most.log]).at(DEEP - 4, few.log, more.log)
    assert in_order(log) == in_order(whole.log)
    said, labels = few.labels(), whole.labels()
    births = zip(born(log), born(whole.log), strict=True)
    assert all(said.get(alike[ours]) == labels.get(theirs) for ours, theirs in births)


def born(log: RequestLog) -> list[int]:
    return [key for key, size, _ in log.events if size >= 0]


def log_of(*events: tuple[str, int]) -> RequestLog:
    """("weight", 8) is born with 8 bytes, ("weight", -1) dies."""
    log, keys = RequestLog(), dict[str, int]()
    log.mark("step")
    for name, size in events:
        if size < 0:
            log.died(keys[name])
        else:
            keys[name] = len(keys)
            log.born(keys[name], size)
    return log


def there_and_back(layers: int, *, largest: int = 0) -> RequestLog:
    """Forward makes a tensor a layer, backward frees them in the other order; one is as large as there are
    layers. `largest`: a layer that makes twice as much."""
    names = [f"layer {n}" for n in range(layers)]
    forward = [(name, 16 if n == largest - 1 else 8) for n, name in enumerate(names)]
    backward = [event for name in reversed(names) for event in ((f"gradient of {name}", 4), (name, -1))]
    return log_of(*forward, ("norms", 100 * layers), *backward, ("norms", -1))


def test_backward_frees_what_the_mirrored_layer_made() -> None:
    layers = RepeatedLayers([there_and_back(n) for n in (3, 4, 5)])
    assert layers.grows
    log, _ = layers.at(17, there_and_back(3), there_and_back(4))
    assert in_order(log) == in_order(there_and_back(20))


def test_other_sizes_are_described_and_another_order_is_not() -> None:
    layers = RepeatedLayers([there_and_back(n) for n in (3, 4, 5)])
    twice = RequestLog()
    twice.marks = there_and_back(3).marks
    twice.events = [
        (k, size if size < 0 else 2 * size, stream) for k, size, stream in there_and_back(3).events
    ]
    assert layers.describes(twice)
    assert not layers.describes(there_and_back(4))


def test_the_order_of_frees_that_follow_one_another_decides_nothing() -> None:
    """Python defers some of a deep model's. Every block of such a group is free at its end either way."""
    births = [("a", 4 * MIB), ("b", 4 * MIB), ("c", 30 * MIB)]
    orders = [[(name, -1) for name in order] for order in ("bca", "abc")]
    logs = [log_of(*births, *frees, ("d", 8 * MIB)) for frees in orders]
    there = [Allocator(parse_settings("", "2.13.0"), None) for _ in logs]
    for log, allocator in zip(logs, there, strict=True):
        assert not [*log.play(0, None, allocator, {}, print)]
    assert all_blocks(there[0]) == all_blocks(there[1])
    pieces = [Piece.of(log, Point(1, 64)) for log in logs]
    assert pieces[0].events != pieces[1].events
    assert pieces[0].add(pieces[1])
    other = Piece.of(log_of(*births, ("b", -1), ("d", 8 * MIB), ("c", -1), ("a", -1)), Point(1, 64))
    assert not pieces[0].add(other)


def test_a_first_and_a_last_layer_of_their_own_are_known_from_two_layers() -> None:
    layers = RepeatedLayers([there_and_back(n) for n in (2, 3, 4)])
    log, _ = layers.at(18, there_and_back(2), there_and_back(3))
    assert in_order(log) == in_order(there_and_back(20))


@pytest.mark.parametrize(
    "logs",
    [
        [there_and_back(3), there_and_back(4), there_and_back(5, largest=5)],
        [there_and_back(3), there_and_back(4, largest=4), there_and_back(5, largest=5)],
        [there_and_back(3), there_and_back(4), there_and_back(6)],
        [there_and_back(1), log_of(("other", 3)), there_and_back(3)],
    ],
    ids=["the third is another", "the last layer is larger", "two layers more", "something else"],
)
def test_what_does_not_repeat_is_refused(logs: list[RequestLog]) -> None:
    with pytest.raises(NotRepeated):
        RepeatedLayers(logs)


def test_a_step_that_loses_memory_is_refused() -> None:
    logs = [there_and_back(n) for n in (3, 4, 5)]
    logs[0].lost = frozenset({0})
    with pytest.raises(NotRepeated, match="loses"):
        RepeatedLayers(logs)
