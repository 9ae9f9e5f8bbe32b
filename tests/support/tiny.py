"""A small model of each family, and the harness's own loop around it: what the toggle tests train."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.observe.storage_tracker import StorageTracker
from harness.recipe.recipe import Recipe
from harness.system import recipes_folder
from harness.training import Training, run_steps, set_up
from tests.support.places import MODELS

CPU = torch.device("cpu")


def tiny(family: str = "llama", **fields: Any) -> Recipe:
    """A recipe of tests/models/<family>.json: hidden size 64, 2 blocks, 264 tokens; fp32 unless told."""
    model = str(MODELS / f"{family}.json")
    sizes = {"micro_batch_size": 2, "seq_len": 16, "learning_rate": 1e-3}
    return Recipe(**({"model": model, "precision": "fp32"} | sizes | fields))


def resized(folder: Path, **sizes: Any) -> str:
    """A copy of tests/models/llama.json in `folder`, with other sizes or of another type: its path."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads((MODELS / "llama.json").read_text()) | sizes))
    return str(path)


def cut(recipe: Recipe, folder: Path, blocks: int = 2) -> Recipe:
    """The recipe with a copy of its model's config, written to `folder`, that has so many blocks, and as many
    in a tower: the others would say the same again."""
    config = json.loads((recipes_folder() / "models" / f"{recipe.model}.json").read_bytes())
    for part in (config, config.get("text_config", {}), config.get("vision_config", {})):
        part |= {name: blocks for name in ("n_layer", "num_hidden_layers", "depth") if name in part}
        if "layer_types" in part:
            part["layer_types"] = part["layer_types"][:blocks]
    path = folder / f"{recipe.model}.json"
    path.write_text(json.dumps(config))
    return recipe.model_copy(update={"model": str(path)})


class Trained(NamedTuple):
    training: Training
    losses: list[float]


class NullObserver:
    """Looks at nothing; calls what it was given for a phase whenever that phase begins."""

    def __init__(self, **beginning: Callable[[], None]) -> None:
        self.beginning = beginning

    def begin_step(self, index: int, kind: str) -> None:
        pass

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.beginning.get(name, lambda: None)()
        yield


class ByteObserver(NullObserver):
    """Follows the storage of every tensor that is made in a phase, from birth to death.

    Device bytes count apart from those in host memory; `live` holds the size of each device storage.
    """

    def __init__(self, **beginning: Callable[[], None]) -> None:
        super().__init__(**beginning)
        self.live: dict[int, int] = {}
        self.allocated_bytes = self.host_bytes = self.host_peak_bytes = 0
        self.peak_bytes: dict[str, int] = defaultdict(int)
        self.end_bytes: dict[str, int] = {}
        self._tracker = StorageTracker(self)
        self._phase = ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phase = name
        with self._tracker, super().phase(name):
            yield
        self.end_bytes[name] = self.allocated_bytes

    def born(self, key: int, size_bytes: int, on_host: bool, op: str, frames: Any, *_: Any) -> None:
        if on_host:
            self.host_bytes += size_bytes
            self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
        else:
            self.live[key] = size_bytes
            self.allocated_bytes += size_bytes
            self.peak_bytes[self._phase] = max(self.peak_bytes[self._phase], self.allocated_bytes)

    def died(self, key: int, size_bytes: int, on_host: bool) -> None:
        if on_host:
            self.host_bytes -= size_bytes
        else:
            self.allocated_bytes -= self.live.pop(key)


def step(training: Training, batches: Iterator[Any], observer: NullObserver | None = None) -> Tensor:
    """One step on the next batches; the loss."""
    (done,) = run_steps(training, batches, CPU, ["timed"], observer or NullObserver())
    return done.loss


def built(recipe: Recipe, observer: NullObserver | None = None) -> tuple[Training, Iterator[Any]]:
    """The training of `recipe` on the CPU, and its batches."""
    return set_up(recipe, CPU, observer or NullObserver())


def train(
    recipe: Recipe, steps: int, observer: NullObserver | None = None, start: dict[str, Tensor] | None = None
) -> Trained:
    """`steps` steps of `recipe`, from the weights in `start` if given, and the loss of each."""
    observer = observer or NullObserver()
    training, batches = built(recipe, observer)
    if start is not None:
        training.model.load_state_dict(start)
    done = run_steps(training, batches, CPU, ["timed"] * steps, observer)
    return Trained(training, [step.loss.item() for step in done])


def weights(training: Training, *, trained_only: bool = False) -> dict[str, Tensor]:
    """Copies of the parameters by name."""
    named = training.model.named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad or not trained_only}


def same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Whether two sets of weights are equal to the last bit (and are not empty)."""
    return bool(ours) and ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
