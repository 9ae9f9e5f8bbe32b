"""The tools of the server, each of which answers with plain data or raises InputError.

The questions about a recipe are those of harness.api, with its arguments. A language model chooses a tool by
its description, which is its docstring. Imports no torch.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import Parameter, Signature, getdoc, signature
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

import harness.api as api
from harness.architecture import shipped_config
from harness.errors import InputError
from harness.hardware import all_hardware
from harness.mcp.folders import Folders
from harness.recipe import (
    Recipe,
    check_recipe,
    find_model_config,
    find_recipe,
    list_card_recipes,
    list_models,
    list_recipes,
    model_name,
    names_model,
    nearest_recipe,
    shortened,
)
from harness.step_profile import StepProfile, explain_oom, verdict
from harness.system import read_mapping

MOST_FILES = 500
"""The most files that the tool `files` lists."""
LONGEST_ANSWER = 60_000
"""The most characters of tables in an answer."""
MOST_STACK_LINES = 12
"""The most lines of each stack in an answer."""
MOST_KINDS = 20
"""The most kinds of allocations in an answer. Allocations from one stack are of one kind."""
LONGEST_NAME = 200
"""The most characters of a recipe's name."""
MOST_SNAPSHOT_BYTES = 2**28
"""The largest snapshot that the server reads; `harness report` reads larger ones, which takes memory."""

RecipeArgument = Annotated[
    str,
    Field(
        description="A recipe's name (the tool `recipes` lists them), or the path of its YAML file in the "
        "folders of this server. Or a model's name, id, config.json or folder, for a recipe of defaults."
    ),
]
Overrides = Annotated[
    dict[str, Any] | None,
    Field(
        description="Fields of the recipe to change, such as {'seq_len': 4096, 'model': 'llama-3.1-8b', "
        "'gradient_checkpointing': true}. A wrong name or value is answered with what is possible."
    ),
]


class Questions:
    """The tools of a server over some folders."""

    def __init__(self, folders: Folders) -> None:
        self.folders = folders

    def tools(self) -> list[Callable[..., Any]]:
        """The tools, which return plain data. A program sees their names, arguments and docstrings."""
        questions = (api.napkin, api.simulate, api.fit, api.formula, api.shard)
        about_recipes = map(self.of_the_api, questions)
        of_files = (self.report, self.snapshot, self.diff)
        return [self.recipes, self.files, *about_recipes, self.hardware, *of_files]

    def recipes(self) -> dict[str, Any]:
        """List the fine-tuning recipes that can be asked about by name, each with a sentence, and models."""
        for_cards = {recipe.name: recipe.description for recipe in list_card_recipes()}
        return {"recipes": dict(list_recipes()), "recipes_for_cards": for_cards, "models": list_models()}

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

    def of_the_api(self, question: Callable[..., Any]) -> Callable[..., Any]:
        """A question of harness.api as a tool with its arguments, except `out`: the server writes nothing.

        The tool's description is the first two paragraphs of the docstring there: what the question is, and
        its arguments.
        """

        def ask(*, recipe: str, overrides: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
            name, loaded = self._name_and_recipe(recipe, overrides)
            return _answer(name, question(loaded, **options))

        options = [
            parameter
            for parameter in signature(question, eval_str=True).parameters.values()
            if parameter.kind is Parameter.KEYWORD_ONLY and parameter.name != "out"
        ]
        about = Parameter("recipe", Parameter.KEYWORD_ONLY, annotation=RecipeArgument)
        changes = Parameter("overrides", Parameter.KEYWORD_ONLY, default=None, annotation=Overrides)
        ask.__signature__ = Signature([about, changes, *options], return_annotation=dict[str, Any])  # type: ignore[attr-defined]
        ask.__name__ = question.__name__
        ask.__doc__ = "\n\n".join((getdoc(question) or "").split("\n\n")[:2])
        return ask

    def hardware(
        self,
        recipe: Annotated[
            str | None, Field(description="A recipe to try on every GPU. Without one: the table itself.")
        ] = None,
        overrides: Overrides = None,
        prices: Annotated[
            dict[str, float] | None, Field(description="Price of an hour by GPU, such as {'h100': 3.5}.")
        ] = None,
        best: Annotated[
            bool,
            Field(
                description="With a recipe: each GPU with the micro batch and toggles with which it is the "
                "fastest, and so the cheapest a token. Takes a minute."
            ),
        ] = False,
        tokens: Annotated[
            int | None,
            Field(description="Tokens to train on, padding included: the hours and the cost of all of them."),
        ] = None,
    ) -> dict[str, Any]:
        """The GPUs that can be asked about; with a recipe, which of them fit it, how fast, at what cost."""
        if recipe is None:
            if overrides or prices or best or tokens is not None:
                raise InputError("overrides, prices, best and tokens are for a recipe. Give its name.")
            return {
                "hardware": [
                    {
                        "name": device.name,
                        "title": device.datasheet.title,
                        "memory_bytes": device.memory_bytes,
                        "memory_bandwidth": device.memory_bandwidth,
                        "dense_flops": {
                            dtype: cited.value for dtype, cited in device.datasheet.flops.items()
                        },
                    }
                    for device in all_hardware()
                ]
            }
        name, loaded = self._name_and_recipe(recipe, overrides)
        return _answer(name, api.hardware(loaded, prices=prices, best=best, tokens=tokens))

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

        section = section_of(read_run(self._small_enough(path)))
        answer: dict[str, Any] = {"answer": [*section.answer, *section.run.notes]}
        if (history := section.run.history) is not None:
            answer["peak_allocated_bytes"] = history.moment()[1]
            answer["phase"] = history.phase()
            answer["at_peak"] = {f"{name}_bytes": size for name, size in history.held().items()}
            answer["largest"] = [
                {**kind._asdict(), "stack": kind.stack[:MOST_STACK_LINES]}
                for kind in section.kinds[:MOST_KINDS]
            ]
        return answer

    def diff(
        self,
        first: Annotated[str, Field(description="A profile or a run folder.")],
        second: Annotated[str, Field(description="Another one, of any recipe, libraries or device.")],
        fail_above: Annotated[
            str | None,
            Field(description="By how much a peak may grow: '5%', '512MiB' or '0'. `beyond` names what did."),
        ] = None,
    ) -> dict[str, Any]:
        """Where the bytes and the time of two profiles differ: by phase, category and module, and in which
        fields of the recipe and versions of libraries."""
        from harness.answers import allowed, diff_document, diff_lines, diff_profiles
        from harness.run_folder import read_profile

        limit = None if fail_above is None else allowed(fail_above)
        found = diff_profiles(*(read_profile(self.folders.inside(path)) for path in (first, second)))
        names = first, second
        return {"answer": "\n".join(diff_lines(found, names)), **diff_document(found, names, limit)}

    def _small_enough(self, text: str) -> Path:
        """The path of a run, profile or snapshot in the folders. Raises InputError for a snapshot of more
        than MOST_SNAPSHOT_BYTES."""
        path = self.folders.inside(text)
        for file in [path] if path.is_file() else path.glob("snapshot.*"):
            if file.stat().st_size > MOST_SNAPSHOT_BYTES:
                raise InputError(
                    f"{file} has more than {MOST_SNAPSHOT_BYTES / 2**20:g} MiB, which this server does not "
                    "read. `harness report` does."
                )
        return path

    def _name_and_recipe(self, recipe: str, overrides: Mapping[str, Any] | None) -> tuple[str, Recipe]:
        """The name and the recipe that a tool's arguments describe. Raises InputError where it names a file
        outside the folders, or code that comes with a model."""
        changes = dict(overrides or {})
        path = self._recipe_file(recipe)
        if path is None:
            name, origin, fields = model_name(recipe), recipe, dict[str, Any](model=recipe)
        else:
            name, origin, fields = path.stem, path.name, read_mapping(path, "recipe")
        for place in ("model", "data"):
            if place in changes:
                changes[place] = self._located(place, changes[place])
            elif place in fields:
                fields[place] = self._located(place, fields[place], *([path.parent] if path else []))
        loaded = check_recipe({**fields, **changes}, origin, list(changes), "overrides")
        if loaded.trust_remote_code:
            raise InputError(
                "trust_remote_code: this server runs no code that comes with a model. Leave it out."
            )
        return name, loaded

    def _recipe_file(self, recipe: str) -> Path | None:
        """The file of a recipe, by its name or its path in the folders; None for a model, which stands
        for a recipe of defaults. Raises InputError."""
        is_name = 0 < len(recipe) <= LONGEST_NAME and "/" not in recipe and os.sep not in recipe
        file = find_recipe(recipe) if is_name else None
        if file is not None or _is_shipped_model(recipe):
            return file
        if is_name and not any(os.path.lexists(root / recipe) for root in self.folders.roots):
            raise InputError(
                f"there is no recipe and no model {shortened(recipe)!r}.{nearest_recipe(recipe)} The tool "
                "`recipes` lists the names."
            )
        found = self.folders.inside(recipe)
        return None if names_model(str(found)) else found

    def _located(self, place: str, value: Any, *bases: Path) -> Any:
        """The value of `place`, which is model or data, as a file in the folders; a model that harness ships
        and synthetic data as they are. Raises InputError for anything else."""
        if not isinstance(value, str) or (place, value) == ("data", "synthetic"):
            return value
        if place == "model" and _is_shipped_model(value):
            return value
        try:
            return str(self.folders.inside(value, *bases))
        except InputError as error:
            names = "a model of recipes/models" if place == "model" else "synthetic"
            raise InputError(
                f"{place}: give {names}, for this server asks no network and reads its folders alone. {error}"
            ) from None


def _is_shipped_model(name: str) -> bool:
    """Whether recipes/models has the model, by its name there or its Hugging Face id."""
    return (find_model_config(name) or shipped_config(name)) is not None


def _kind(path: Path) -> str | None:
    """Under which heading the tool `files` lists a file; None for one that it does not list."""
    if path.name == "profile.json":
        return "runs"
    if path.stem.startswith("snapshot") and path.suffix in (".pickle", ".json"):
        return "snapshots"
    if path.name.endswith((".napkin.json", ".simulated.json", ".emulated.json", ".measured.json")):
        return "profiles"
    return "recipes" if path.suffix in (".yaml", ".yml") and path.name != "recipe.yaml" else None


def _answer(name: str, found: Any) -> dict[str, Any]:
    """An answer of harness.api about the recipe `name` as plain data, with its text as `answer`."""
    if not isinstance(found, StepProfile):
        found = replace(found, name=name)
        return {"answer": str(found), **found.as_json()}
    found.provenance["recipe_name"] = name
    for allocation in (*found.top, *(found.oom.top if found.oom else ())):
        allocation.stack = allocation.stack[:MOST_STACK_LINES]
    sentence = verdict(found) if found.oom is None else explain_oom(found)
    return {"answer": f"{name}: {sentence}", "profile": found.model_dump(mode="json")}
