"""The simulation is the step: the same storages are born and die, in the same order, as on real CPU tensors.

Both runs go through the one training step. Left: real tensors. Right: shape-only tensors, with CUDA's
behaviour switched off (each rule that stays is a question of values: see `_shape_only`). What CUDA does
differently is then all that a GPU has to prove. Toggles are here one by one; the recordings called random-*
have them together, as CUDA allocates them (test_recorded_traces.py).
"""

from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import FalconConfig

from harness.kernels.operators import operator_of
from harness.observe.storage_tracker import StorageTracker
from harness.recipe.recipe import Recipe
from harness.simulate.cuda.autocast import cuda_autocast_on_meta
from harness.simulate.cuda.behaviour import seen_tensor
from harness.simulate.cuda.shape_cache import ShapeCache
from harness.training.evaluation import Evaluation, evaluate
from harness.training.loop import batches_of, run_steps, set_up
from tests.support.tiny import NullObserver, tiny

LORA: dict[str, Any] = {"adapter": "lora", "lora_rank": 4}
TOGGLES: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {},
    "fp16": {"precision": "fp16"},
    "mixed": {"precision": "bf16-mixed"},
    "clipped": {"max_grad_norm": 1.0},
    "master weights": {"master_weights": True},
    "checkpointing": {"gradient_checkpointing": True},
    "accumulation": {"gradient_accumulation_steps": 3},
    "one sequence": {"micro_batch_size": 1},
    "odd length": {"seq_len": 37},
    "lora": LORA,
    "dropout": {**LORA, "lora_dropout": 0.1},
    "ia3": {"adapter": "ia3"},
    "eager": {"attention": "eager"},
    "for_loop": {"optimizer_impl": "for_loop"},
    "fused": {"optimizer_impl": "fused"},
    "sgd": {"optimizer": "sgd"},
    "adafactor": {"optimizer": "adafactor"},
    "selective": {"gradient_checkpointing": True, "selective_checkpointing": True},
    "muon": {"optimizer": "muon"},
    "schedule free": {"optimizer": "adamw_schedule_free"},
    "in backward": {"optimizer_in_backward": True},
    "offload activations": {"offload": ["activations"]},
    "offload optimizer": {"offload": ["optimizer"]},
    "offload both": {"offload": ["optimizer", "activations"]},
    "offload parameters": {"offload": ["parameters"]},
    "nf4": {**LORA, "quantization": "nf4"},
    "fp4 upcast": {**LORA, "quantization": "fp4", "upcast_for_kbit": True},
    # not the 8-bit optimizers: they copy their code table to the device, and on the CPU it is there already
    "mixtral": {"family": "mixtral"},
    "packing": {"packing": True, "seq_len": 64},
    # fp32: in 16 bit the CPU's layer norm keeps its mean in 16 bit, and CUDA's (like meta's) in fp32
    "gpt2": {"family": "gpt2", "precision": "fp32"},
    "pythia": {"family": "pythia", "precision": "fp32"},
    "gemma2": {"family": "gemma2", "attention": "eager"},
}


class _Events:
    """A sink: (+ or -, key of the storage, bytes, on the host) in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int, bool]] = []

    def born(self, key: int, size_bytes: int, on_host: bool, op: str, frames: Any, *_: Any) -> None:
        self.seen.append(("+", key, size_bytes, on_host))

    def died(self, key: int, size_bytes: int, on_host: bool) -> None:
        self.seen.append(("-", key, size_bytes, on_host))


class _ShapeOnly(StorageTracker):
    """Shape-only operators as the simulator runs them, without anything CUDA does differently."""

    def __init__(self, sink: _Events) -> None:
        super().__init__(sink)
        self._shapes = ShapeCache()

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        result = operator_of(func).result
        out = NotImplemented if result is None else result(func, args, kwargs)
        return self._shapes.run(func, args, kwargs)[0] if out is NotImplemented else out


def _events(
    recipe: Recipe, device: torch.device, evaluation: Evaluation | None = None
) -> list[tuple[str, int, int, bool]]:
    """Every birth and death from the first step to the end of the second, and of the evaluation behind it."""
    events = _Events()
    tracker = StorageTracker(events) if device.type == "cpu" else _ShapeOnly(events)
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # shape-only tensors have no other
        stack.enter_context(patch("torch.optim.optimizer._get_fused_kernels_supported_devices", _devices))
        if device.type == "meta":
            stack.enter_context(cuda_autocast_on_meta())
            stack.enter_context(patch("torch.tensor", seen_tensor))
        training, batches = set_up(recipe, device, NullObserver())
        if device.type == "meta":  # making the rows takes memory too, which shapes do not
            batches = set_up(recipe, torch.device("cpu"), NullObserver())[1]
        stack.enter_context(tracker)
        for _ in run_steps(training, batches, device, ["warmup"] * 2, NullObserver()):
            events.seen.append(("end of step", 0, 0, False))
        if evaluation is not None:
            real_rows = patch("harness.training.evaluation.batches_of", _real_rows)
            with real_rows:  # as above
                done = evaluate(recipe, training, evaluation, device, NullObserver(), lambda: None)
            events.seen.append(("end of evaluation", 0, 0, False))
            del done
        seen = events.seen[:]  # what follows is Python taking the run apart
    return _deaths_in_order(seen) if recipe.mixed else seen


def _real_rows(*asked: Any, shapes_only: bool) -> Any:
    return batches_of(*asked, shapes_only=False)


def _deaths_in_order(events: list[Any]) -> list[Any]:
    """Deaths between two births, sorted: autocast drops its cached casts in the order of a hash table."""
    ordered = []
    for dies, group in groupby(events, lambda event: event[0] == "-"):
        run = list(group)
        ordered += sorted(run) if dies else run
    return ordered


def _devices() -> list[str]:
    return ["cpu", "meta"]


@pytest.mark.parametrize("fields", TOGGLES.values(), ids=TOGGLES)
def test_shape_only_events_equal_those_of_real_tensors(fields: dict[str, Any]) -> None:
    recipe = tiny(**{"precision": "bf16", **fields})
    real, shapes = _events(recipe, torch.device("cpu")), _events(recipe, torch.device("meta"))
    assert len(real) > 300
    difference = next((pair for pair in zip(real, shapes, strict=False) if pair[0] != pair[1]), None)
    assert difference is None
    assert len(real) == len(shapes)


EVALUATED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all logits": ({"precision": "bf16"}, {}),
    "all logits, mixed": ({"precision": "bf16-mixed"}, {}),
    "accumulated": ({"precision": "fp32"}, {"accumulation_steps": 2}),
    "accumulated, lora": ({**LORA, "precision": "bf16"}, {"accumulation_steps": 1}),
    "loss alone": ({"precision": "bf16"}, {"keep_logits": False}),
}


@pytest.mark.parametrize(("fields", "how"), EVALUATED.values(), ids=EVALUATED.keys())
def test_an_evaluation_on_shapes_is_that_on_real_tensors(fields: dict[str, Any], how: dict[str, Any]) -> None:
    recipe, evaluation = tiny(**fields), Evaluation(batches=5, batch_size=2, **how)
    cpu, meta = (_events(recipe, torch.device(name), evaluation) for name in ("cpu", "meta"))
    begin = len(_events(recipe, torch.device("cpu")))
    assert sum(on_host for _, _, _, on_host in cpu[begin:]) >= 2
    assert len(cpu) - begin > 100
    assert cpu == meta


FALCON: dict[str, dict[str, Any]] = {
    "one key-value head": {},
    "grouped key-value heads": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "as many as queries": {"multi_query": False},
    "alibi": {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("sizes", FALCON.values(), ids=FALCON.keys())
def test_falcon_indexes_with_lists_which_become_tensors(
    sizes: dict[str, Any], attention: str, tmp_path: Path
) -> None:
    """x[..., [-2], :]: 8 bytes on the device, kept for backward. fp32, as for gpt2."""
    shape = {"vocab_size": 264, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    FalconConfig(**shape, **sizes).save_pretrained(tmp_path)
    recipe = tiny(model=str(tmp_path / "config.json"), attention=attention)
    real, shapes = _events(recipe, torch.device("cpu")), _events(recipe, torch.device("meta"))
    assert real == shapes
