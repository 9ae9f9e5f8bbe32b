"""The simulation of a deep model, derived from simulations of the same model with few of its layers."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple, cast

from harness.allocator import Settings
from harness.architecture import LAYERS, find_config, load_shape, read_config
from harness.formula import Label, NotRepeated, RepeatedLayers, RequestLog, Times
from harness.hardware import Hardware
from harness.recipe import Recipe
from harness.step_profile import StepProfile

PERIODS = (1, 2, 3, 4, 6)
"""Numbers of layers after which a model's layers repeat: in Gemma 3, five with a window and one without."""
FEWEST = 4
"""The fewest layers that are simulated, and two periods of them at least: the first and the last layer may
make requests of their own."""
WORTH_IT, WORTH_TIMING = 0.67, 0.5
"""Fractions of the layers. Two simulations that have more layers than this together save no time: in a
search, which goes on with the fewer layers of the two at other sizes; and where times need both each time."""


AtOnce = Callable[[Callable[[], Any], Callable[[], Any]], tuple[Any, Any]]
"""Runs two functions and returns their results."""


def in_turn(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """The results of both."""
    return first(), second()


class Simulated(NamedTuple):
    """What simulate_for_devices returns, for a model that was not simulated with all layers."""

    log: RequestLog
    profile: StepProfile
    """The profile of the model with the fewest layers, but with the whole one's recipe and host memory."""
    labels: dict[int, Label]
    """What each allocation is for, by its key in `log`."""
    times: dict[str, Times]
    """The step's times by name of the device; empty where they were not asked for."""


class FewLayers:
    """Simulates recipes with few of their layers, on `devices` that all run the same kernels."""

    def __init__(self, devices: Sequence[Hardware], settings: Settings) -> None:
        self._devices, self._settings = devices, settings
        self._known: dict[Recipe, _Model] = {}
        """The models by recipe without its sizes."""
        self._refused: set[Recipe] = set()
        """Recipes without their sizes whose layers do not repeat. Folders of models stay, since a process
        that was forked may read them."""

    def simulated(self, recipe: Recipe, *, timed: bool, at_once: AtOnce = in_turn) -> Simulated | None:
        """What a simulation with all layers would return; None where few layers do not determine it.

        With `timed` it has the step's times, which may take twice as long. Simulations that do not wait for
        one another are run by `at_once`.
        """
        model = self.model(recipe)
        if model is None or (timed and not model.is_worth_timing):
            return None
        try:
            return model.simulated(recipe, timed, at_once)
        except Exception:  # a model that was cut may fail in any way; with all layers it says what is wrong
            self._refused.add(_without_sizes(recipe))
            return None

    def model(self, recipe: Recipe) -> _Model | None:
        """The recipe's model, cut to few layers; None where that is not possible."""
        name = _without_sizes(recipe)
        if name not in self._refused and name not in self._known:
            try:
                self._known[name] = _Model(recipe, self._devices, self._settings)
            except Exception:  # of a config that is no model's
                self._refused.add(name)
        return None if name in self._refused else self._known[name]


def _without_sizes(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"micro_batch_size": 1, "seq_len": 1})


@lru_cache(maxsize=8)
def _repeated(recipe: Recipe) -> list[RepeatedLayers]:
    """One for each sequence of requests of `recipe` that was seen, at different sizes or on other devices."""
    return []


class _Model:
    """The model of one recipe, cut to few layers. Raises NotRepeated if its layers do not repeat."""

    def __init__(self, recipe: Recipe, devices: Sequence[Hardware], settings: Settings) -> None:
        if recipe.trust_remote_code or recipe.ddp:  # DDP's buckets end within layers
            raise NotRepeated("it cannot be cut")
        self._devices, self._settings = devices, settings
        self._config = read_config(find_config(recipe.model))
        part = decoder_config(self._config)
        self._layers = next((part[name] for name in LAYERS if isinstance(part.get(name), int)), 0)
        self._folder = tempfile.mkdtemp()
        # deleted with this object, and at the end of a forked process, but by none that did not make it
        Finalize(self, shutil.rmtree, (self._folder, True), exitpriority=0)
        self._paths: dict[int, str] = {}
        """The paths of the configs that were cut, by number of layers."""
        self._fewest, self._period = self._choose(recipe)
        self._known = _repeated(_without_sizes(recipe))

    @property
    def is_worth_timing(self) -> bool:
        """Whether the times of two models with few layers take less than those of all layers."""
        return 2 * self._fewest + self._period <= WORTH_TIMING * self._layers

    def simulated(self, recipe: Recipe, timed: bool, at_once: AtOnce) -> Simulated:
        """The step of `recipe`, which may have other sizes than the recipe that this model was made for.
        Raises NotRepeated, and what a simulation raises."""
        made: dict[int, Simulated] = {}

        def simulated(n: int) -> Simulated:
            if n not in made:
                made[n] = self._simulate(recipe, n)
            return made[n]

        if not self._known:  # all three will be asked for
            _, made[2] = at_once(lambda: (simulated(0), simulated(1)), lambda: simulated(2))
        few = simulated(0)
        layers = next((known for known in self._known if known.describes(few.log)), None)
        grows = layers is None or layers.grows or recipe.blocks_on_host
        more = simulated(1) if timed or grows else few
        if layers is None:
            layers = RepeatedLayers([few.log, more.log, simulated(2).log])
            self._known.append(layers)
        same_warnings = few.profile.warnings == more.profile.warnings
        if timed and not same_warnings:
            raise NotRepeated("one layer more has another warning")
        times = (self._layers - self._fewest) // self._period
        log, origins = layers.at(times, few.log, more.log)
        labels = {key: few.labels[origin] for key, origin in origins.items() if origin in few.labels}
        step_times = {name: each.deeper(more.times[name], times) for name, each in few.times.items()}
        host, host_more = (each.profile.memory.host_bytes or 0 for each in (few, more))
        warnings = few.profile.warnings if same_warnings else []  # a search ends with all layers, and theirs
        profile = few.profile.model_copy(
            update={"recipe": recipe.model_dump(mode="json"), "warnings": warnings}
        )
        # weights and states are as large at all sizes, and known from the first
        profile.memory.host_bytes = (host + times * (host_more - host) or None) if more is not few else None
        return Simulated(log, profile, labels, step_times if more is not few else {})

    def _simulate(self, recipe: Recipe, n: int) -> Simulated:
        """Simulate the model with the fewest layers and `n` periods more."""
        from harness.simulate import simulate_for_devices

        cut = recipe.model_copy(update={"model": self._cut(self._fewest + n * self._period)})
        profile, memory, times = simulate_for_devices(cut, self._devices, self._settings)
        return Simulated(memory.log, profile, memory.labels(), times)

    def _choose(self, recipe: Recipe) -> tuple[int, int]:
        """The fewest layers to simulate and their period, such that deeper models have the right number of
        layers of every kind."""
        first_dense = decoder_config(self._config).get("first_k_dense_replace") or 0
        for period in PERIODS:
            fewest = first_dense + max(FEWEST, 2 * period)
            fewest += (self._layers - fewest) % period
            if 2 * fewest + period > WORTH_IT * self._layers:
                continue
            models = self._cut(fewest), self._cut(fewest + period), recipe.model
            few, more, whole = (
                Counter({(block.mixer, block.feed): block.count for block in load_shape(model).kinds})
                for model in models
            )
            times = (self._layers - fewest) // period
            grown = {kind: few[kind] + times * (more[kind] - few[kind]) for kind in {*few, *more}}
            lists, beyond = self._lists().values(), range(fewest, self._layers)
            if grown == whole and all(values[n] == values[n - period] for values in lists for n in beyond):
                return fewest, period
        raise NotRepeated(f"its {self._layers} layers do not repeat")

    def _lists(self) -> dict[str, list[Any]]:
        """The lists in the config that have an entry for each layer, by field."""
        part = decoder_config(self._config)
        lists = {k: cast("list[Any]", v) for k, v in part.items() if isinstance(v, list)}
        return {k: v for k, v in lists.items() if len(v) == self._layers}

    def _cut(self, layers: int) -> str:
        """The path of the config with so many layers."""
        if layers not in self._paths:
            config = json.loads(json.dumps(self._config))
            part = decoder_config(config)
            part |= {name: layers for name in LAYERS if name in part}
            part |= {name: values[:layers] for name, values in self._lists().items()}
            path = Path(self._folder) / f"{layers}.json"
            path.write_text(json.dumps(config))
            self._paths[layers] = str(path)
        return self._paths[layers]


def decoder_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the language model, which a model with images has within its own."""
    return config.get("text_config", config)
