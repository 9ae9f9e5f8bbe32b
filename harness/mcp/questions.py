"""What the tools answer: each a method with typed arguments that returns plain data, or raises InputError.

Their descriptions are what a model reads to choose one. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

import harness.api as api
from harness.errors import InputError, nearest
from harness.hardware import DEFAULT_HARDWARE, all_hardware, read_prices
from harness.mcp.folders import Folders
from harness.recipe import Recipe, check_recipe, find_model_config, list_recipes, shortened
from harness.step_profile import StepProfile, explain_oom, verdict
from harness.system import quiet_libraries, read_mapping, recipes_folder

MOST_FILES = 500
"""That are listed."""
LONGEST_ANSWER = 60_000
"""Characters of tables."""
MOST_STACK_LINES = 12
LONGEST_NAME = 200
MOST_SNAPSHOT_BYTES = 2**28
"""Of what the server reads; `harness report` reads larger ones, with the memory that takes."""

RecipeArgument = Annotated[
    str,
    Field(
        description="A recipe's name (the tool `recipes` lists them), or the path of its YAML file in the "
        "folders of this server."
    ),
]
HardwareArgument = Annotated[
    str,
    Field(description="A GPU of the table, such as h100 or rtx-4090 (the tool `hardware` lists them)."),
]
MemoryArgument = Annotated[
    str | None, Field(description="Another size of the GPU's memory, such as 16GiB or 24GB.")
]
Overrides = Annotated[
    dict[str, Any] | None,
    Field(
        description="Fields of the recipe to change, such as {'seq_len': 4096, 'model': 'llama-3.1-8b', "
        "'gradient_checkpointing': true}. A wrong name or value is answered with what is possible."
    ),
]


class Questions:
    """The tools, over some folders."""

    def __init__(self, folders: Folders) -> None:
        self.folders = folders

    def recipes(self) -> dict[str, Any]:
        """List the fine-tuning recipes that can be asked about by name, each with a sentence."""
        return {"recipes": dict(list_recipes())}

    def files(self) -> dict[str, Any]:
        """List run folders, profiles, memory snapshots and recipes in the folders of this server."""
        kinds: dict[str, list[str]] = {"runs": [], "profiles": [], "snapshots": [], "recipes": []}
        listed = 0
        for path in self.folders.files():
            kind = _kind(path)
            if kind is None:
                continue
            listed += 1
            if listed > MOST_FILES:
                break
            kinds[kind].append(str(path.parent if kind == "runs" else path))
        return {**kinds, "more_than_listed": listed > MOST_FILES}

    def napkin(
        self,
        recipe: RecipeArgument,
        hardware: HardwareArgument = DEFAULT_HARDWARE,
        memory: MemoryArgument = None,
        overrides: Overrides = None,
    ) -> dict[str, Any]:
        """GPU memory and time of a training step by a textbook's arithmetic: about right, in milliseconds."""
        name, asked = self._asked(recipe, overrides)
        return _answer(name, api.napkin(asked, hardware=hardware, memory=memory))

    def simulate(
        self,
        recipe: RecipeArgument,
        hardware: HardwareArgument = DEFAULT_HARDWARE,
        memory: MemoryArgument = None,
        overrides: Overrides = None,
        allocator: Annotated[
            str | None, Field(description="Allocator settings, such as expandable_segments:True.")
        ] = None,
        phases: Annotated[
            str,
            Field(
                description="What to simulate: train, or train,eval,save for what an evaluation and a "
                "checkpoint, as transformers' Trainer makes them, need behind it."
            ),
        ] = "train",
        rank: Annotated[
            int, Field(ge=0, description="Which rank of a recipe that is divided among several.")
        ] = 0,
    ) -> dict[str, Any]:
        """GPU memory of a training step to the byte, and its estimated time, by running it without data.

        It takes seconds. Where the memory does not suffice it says in which phase, what fills it and what
        would help.
        """
        name, asked = self._asked(recipe, overrides)
        where: dict[str, Any] = {"hardware": hardware, "memory": memory, "allocator": allocator}
        return _answer(name, api.simulate(asked, **where, phases=phases, rank=rank))

    def fit(
        self,
        recipe: RecipeArgument,
        hardware: HardwareArgument = DEFAULT_HARDWARE,
        memory: MemoryArgument = None,
        overrides: Overrides = None,
        quick: Annotated[
            bool,
            Field(
                description="By arithmetic alone, in a moment; otherwise seen by simulations, up to minutes."
            ),
        ] = False,
    ) -> dict[str, Any]:
        """The largest micro batch and sequence length that fit a GPU, or what to change when nothing does."""
        name, asked = self._asked(recipe, overrides)
        found = replace(api.fit(asked, hardware=hardware, memory=memory, quick=quick), name=name)
        return {"answer": str(found), **found.as_json()}

    def hardware(
        self,
        recipe: Annotated[
            str | None, Field(description="A recipe to try on every GPU. Without one: the table itself.")
        ] = None,
        overrides: Overrides = None,
        prices: Annotated[
            dict[str, float] | None, Field(description="Price of an hour by GPU, such as {'h100': 3.5}.")
        ] = None,
    ) -> dict[str, Any]:
        """The GPUs that can be asked about; with a recipe, which of them fit it, how fast, at what cost."""
        if recipe is None:
            return {
                "hardware": [
                    {
                        "name": one.name,
                        "title": one.datasheet.title,
                        "memory_bytes": one.memory_bytes,
                        "memory_bandwidth": one.memory_bandwidth,
                        "dense_flops": {dtype: cited.value for dtype, cited in one.datasheet.flops.items()},
                    }
                    for one in all_hardware()
                ]
            }
        from harness.fit import compare_hardware

        given = read_prices(None, [f"{name}={price}" for name, price in (prices or {}).items()])
        name, asked = self._asked(recipe, overrides)
        quiet_libraries()
        return {"recipe": name, "offers": [offer.document() for offer in compare_hardware(asked, given)]}

    def report(
        self,
        paths: Annotated[
            list[str],
            Field(min_length=1, max_length=20, description="Run folders, profiles or memory snapshots."),
        ],
    ) -> dict[str, Any]:
        """What fills the memory and what takes the time in runs that are there, as sentences and tables.

        Several are compared: which fields of their recipes differ, and which numbers.
        """
        from harness.report import read_run, report_tables, section_of, to_markdown

        runs = [read_run(self._small_enough(path)) for path in paths]
        sections = [section_of(run) for run in runs]
        words = {section.name: [*section.answer, *section.run.notes] for section in sections}
        tables = to_markdown(report_tables(sections))
        cut = len(tables) > LONGEST_ANSWER
        return {"answer": words, "tables_in_markdown": tables[:LONGEST_ANSWER], "tables_are_cut": cut}

    def snapshot(
        self,
        path: Annotated[
            str,
            Field(
                description="A snapshot.pickle or .json, of harness or PyTorch, or the run folder with one."
            ),
        ],
    ) -> dict[str, Any]:
        """What was in the memory of a recorded snapshot when the most was allocated: by category, and the
        largest allocations with the code that made them."""
        from harness.report import read_run, section_of
        from harness.snapshot import breakdown_at, find_peak, top_allocations

        run = read_run(self._small_enough(path))
        answer: dict[str, Any] = {"answer": [*section_of(run).answer, *run.notes]}
        if run.history is not None and run.history.spans:
            peak = find_peak(run.history.spans)
            top = top_allocations(run.history.spans, peak.index)
            answer["peak_allocated_bytes"] = peak.allocated_bytes
            answer["phase"] = peak.phase
            answer["at_peak"] = breakdown_at(run.history.spans, peak.index).model_dump()
            answer["largest"] = [
                {**allocation.model_dump(), "stack": allocation.stack[:MOST_STACK_LINES]}
                for allocation in top
            ]
        return answer

    def _small_enough(self, text: str) -> Path:
        """What of the folders is read for a report. Raises InputError."""
        path = self.folders.inside(text)
        for file in [path] if path.is_file() else path.glob("snapshot.*"):
            if file.stat().st_size > MOST_SNAPSHOT_BYTES:
                raise InputError(
                    f"{file} has more than {MOST_SNAPSHOT_BYTES / 2**20:g} MiB, which this server does not "
                    "read. `harness report` does."
                )
        return path

    def _asked(self, recipe: str, overrides: Mapping[str, Any] | None) -> tuple[str, Recipe]:
        """Name and recipe, of which every file is one that may be read. Raises InputError."""
        changes = dict(overrides or {})
        is_name = 0 < len(recipe) <= LONGEST_NAME and "/" not in recipe and os.sep not in recipe
        named = recipes_folder() / f"{recipe}.yaml"
        if is_name and named.is_file():
            path = named
        elif is_name and not any(os.path.lexists(root / recipe) for root in self.folders.roots):
            hint = nearest(recipe, [name for name, _ in list_recipes()])
            raise InputError(
                f"there is no recipe {shortened(recipe)!r}.{hint} The tool `recipes` lists the names."
            )
        else:
            path = self.folders.inside(recipe)
        fields = read_mapping(path, "recipe")
        for place in ("model", "data"):
            if place in changes:
                changes[place] = self._located(place, changes[place])
            elif place in fields:
                fields[place] = self._located(place, fields[place], path.parent)
        asked = check_recipe({**fields, **changes}, path.name, list(changes), "overrides")
        if asked.trust_remote_code:
            raise InputError(
                "trust_remote_code: this server runs no code that comes with a model. Leave it out."
            )
        return path.stem, asked

    def _located(self, place: str, value: Any, *bases: Path) -> Any:
        """A model or data that may be read: a name of ours, or a file in the folders. Raises InputError."""
        if not isinstance(value, str) or (place, value) == ("data", "synthetic"):
            return value
        if place == "model" and find_model_config(value):
            return value
        try:
            return str(self.folders.inside(value, *bases))
        except InputError as error:
            names = "a model of recipes/models" if place == "model" else "synthetic"
            raise InputError(
                f"{place}: give {names}, for this server asks no network and reads its folders alone. {error}"
            ) from None


def _kind(path: Path) -> str | None:
    if path.name == "profile.json":
        return "runs"
    if path.stem.startswith("snapshot") and path.suffix in (".pickle", ".json"):
        return "snapshots"
    if path.name.endswith((".napkin.json", ".simulated.json", ".emulated.json", ".measured.json")):
        return "profiles"
    return "recipes" if path.suffix in (".yaml", ".yml") and path.name != "recipe.yaml" else None


def _answer(name: str, profile: StepProfile) -> dict[str, Any]:
    """What is said of a profile, and the profile."""
    profile.provenance["recipe_name"] = name
    for allocation in (*profile.top, *(profile.oom.top if profile.oom else ())):
        allocation.stack = allocation.stack[:MOST_STACK_LINES]
    said = verdict(profile) if profile.oom is None else explain_oom(profile)
    return {"answer": f"{name}: {said}", "profile": profile.model_dump(mode="json")}
