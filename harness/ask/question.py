"""A question read from the query string of an address, checked, and written as a command and as YAML.

Anybody may have written the address. It can set only fields that change memory or time, so a question loads
no weights and no data set, and runs no code that comes with a model.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from harness.errors import InputError, nearest
from harness.fit import among, read_counts, read_tokens
from harness.hardware import DEFAULT_HARDWARE, Hardware, find_hardware, parse_bytes, with_memory
from harness.recipe import (
    EFFECTS,
    ImpossiblePair,
    Recipe,
    check_recipe,
    list_card_recipes,
    list_models,
    list_recipes,
    load_recipe,
    model_name,
    recipe_names,
    shortened,
    shown,
)
from harness.system import parse_yaml, to_yaml

_Count = Annotated[int, Field(gt=0, lt=2**31)]


class After(BaseModel):
    """What follows the training steps: the options of `harness simulate`, and `after` for its --phases."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    after: tuple[Literal["eval", "save"], ...] = ()
    """Behind the training steps: an evaluation as transformers' Trainer does it, and its checkpoint."""
    eval_batches: _Count | None = None
    """How many batches an evaluation has; empty: 10."""
    eval_batch_size: _Count | None = None
    """Their rows, per_device_eval_batch_size; empty: 8."""
    eval_accumulation_steps: _Count | None = None
    """After so many batches logits go to the host; empty: at the end."""
    eval_loss_only: bool = False
    """Keep no logits: prediction_loss_only, or no compute_metrics."""
    full_state_dict: bool = False
    """Where the model is divided among ranks: rank 0 gathers it and writes it whole."""

    @field_validator("after", mode="before")
    @classmethod
    def _list_from_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @property
    def options(self) -> list[str]:
        """The same as options of `harness simulate`."""
        words = ["--phases", ",".join(["train", *self.after])] if self.after else []
        for name, value in self.model_dump(exclude={"after"}, exclude_defaults=True).items():
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return words

    @property
    def evaluation(self) -> dict[str, tuple[str, int | bool]]:
        """The fields of training's Evaluation with their values, by the field here that sets each."""
        fields = dict[str, tuple[str, int | bool]]()
        for name in ("eval_batches", "eval_batch_size", "eval_accumulation_steps"):
            if getattr(self, name) is not None:
                fields[name] = (name.removeprefix("eval_"), getattr(self, name))
        return fields | ({"eval_loss_only": ("keep_logits", False)} if self.eval_loss_only else {})


def read_after(given: Mapping[str, str]) -> After:
    """Read the fields of After among those of a question. Raises InputError for an impossible value, and for
    one that belongs to an evaluation or a checkpoint which the question does not ask for."""
    values = {name: parse_yaml(given[name], name) for name in After.model_fields if given.get(name)}
    try:
        found = After.model_validate(values)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        name, problem = str(wrong["loc"][0]), wrong["msg"][0].lower() + wrong["msg"][1:]
        raise InputError(f"{name}: {shortened(shown(values[name]))} is not possible: {problem}.") from None
    if found.evaluation and "eval" not in found.after:
        raise InputError(f"{next(iter(found.evaluation))} belongs to an evaluation. Set after: eval too.")
    if found.full_state_dict and "save" not in found.after:
        raise InputError("full_state_dict belongs to a checkpoint. Set after: save too.")
    return found


LONGEST = 4_000
"""The most characters that a question may have."""
MOST_FIELDS = 80
"""The most fields that a question may set."""
HANDED = "harness-handed-"
"""The prefix of the folder that holds a config.json which a reader gave to the page."""
MOST_CHANGES = 3
"""The most fields that a proposed fix changes."""
ASKED = tuple(name for name in Recipe.model_fields if name not in EFFECTS)
"""The fields of a recipe that a question may set: those that change memory or time."""
BESIDE = ("recipe", "hardware", "memory", "gpus", "tokens", *After.model_fields)
"""What a question may set besides fields of a recipe, with the meaning that the commands give it."""
_PROPOSED = re.compile(r"\b([a-z][a-z0-9_]*): ([\w./-]+|\[[\w, ]*\])")
"""A field and a value that the sentence of a broken rule proposes, as in "loss: standard"."""


@dataclass(frozen=True)
class Question:
    """Does this recipe fit this device, and how fast is it?"""

    recipe: Recipe
    hardware: Hardware
    memory: str = ""
    """The size of the device's memory as the question writes it, as in 16GiB; empty for the device's own."""
    after: After = field(default_factory=After)
    tokens: int = 0
    """The number of tokens to train on, padding included; 0 where the question names none."""

    @cached_property
    def _nearest(self) -> tuple[str, dict[str, Any]]:
        return _nearest_recipe(self.recipe)

    @property
    def _model(self) -> str:
        """The model as another machine can name it: without the folder of a config given to the page."""
        path = Path(self.recipe.model)
        return path.name if path.parent.name.startswith(HANDED) else self.recipe.model

    @property
    def name(self) -> str:
        """The name of the nearest recipe if that is about the same model; else the model's name."""
        name, changes = self._nearest
        return model_name(changes.get("model", name))

    @property
    def command(self) -> str:
        """The `harness simulate` command that asks the same."""
        base, changes = self._nearest
        base = self._model if base == self.recipe.model else base
        changes = changes | ({"model": self._model} if "model" in changes else {})
        words = ["harness", "simulate", base, *(f"{name}={shown(value)}" for name, value in changes.items())]
        words.append(f"hardware={self.hardware.name}")
        words += ["--memory", self.memory] if self.memory else []
        return shlex.join([*words, *self.after.options])

    @property
    def yaml(self) -> str:
        """The recipe as a file: the model, and the fields that differ from the defaults."""
        defaults = Recipe(model=self.recipe.model).model_dump(mode="json")
        fields = self.recipe.model_dump(mode="json") | {"model": self._model}
        return to_yaml(_differing(defaults, fields, ("model",)))

    def as_said(self) -> dict[str, Any]:
        """The value of every field of the form in this question."""
        recipe = self.recipe
        others = {"hardware": self.hardware.name, "memory": self.memory, "gpus": recipe.world_size}
        others["tokens"] = str(self.tokens or "")
        return {**recipe.model_dump(mode="json"), **self.after.model_dump(mode="json"), **others}


def read_question(text: str) -> Question:
    """Read a question from a query string, as in recipe=llama-3.1-8b-lora&seq_len=4096&hardware=rtx-4090.

    Raises InputError, which says what to write, for a text that is no question, and ImpossiblePair for fields
    that exclude each other.
    """
    if len(text) > LONGEST:
        raise InputError(f"the question has {len(text):,} characters; {LONGEST:,} are enough for any.")
    try:
        pairs = parse_qsl(
            text,
            keep_blank_values=True,
            strict_parsing=bool(text),
            max_num_fields=MOST_FIELDS,
            errors="strict",
        )
    except ValueError:  # UnicodeDecodeError is one
        raise InputError("the question is no name=value&name=value. Begin again from the form.") from None
    given = dict(pairs)
    if len(given) < len(pairs):
        twice = next(name for name in given if [key for key, _ in pairs].count(name) > 1)
        raise InputError(f"the question says {shortened(twice)} twice. Keep one.")
    for name in given:
        if name not in ASKED and name not in BESIDE:
            raise InputError(_unknown_field(name))
    hardware = find_hardware(given.get("hardware") or DEFAULT_HARDWARE)
    memory = given.get("memory", "").strip()
    if memory:
        hardware = with_memory(hardware, parse_bytes(memory))
    recipe = check_recipe(_fields(given), "the question", [*given], "question")
    counts = read_counts(given["gpus"]) if given.get("gpus") else [1]
    if len(counts) > 1:
        raise InputError(f"gpus: {shortened(given['gpus'])}: give one number.")
    recipe = recipe if counts == [1] else among(recipe, counts[0])
    tokens = given.get("tokens", "").strip()
    return Question(
        recipe, hardware, memory, read_after(given), read_tokens(tokens, "tokens:") if tokens else 0
    )


def mistake(text: str, error: InputError) -> dict[str, Any]:
    """The document that tells a page what is wrong with the question `text`: the `error`, and `fixes`, each a
    set of fields with which the recipe is possible."""
    if not isinstance(error, ImpossiblePair):
        return {"error": str(error), "fixes": []}
    given = dict(parse_qsl(text, keep_blank_values=True))
    fields = _fields(given)
    found = [*_fixes(fields, error.rule, {})]
    least = [fix for fix in found if not any(other.items() < fix.items() for other in found)]
    fixes = [
        {"fields": fix, "words": ", ".join(f"{name}: {value}" for name, value in fix.items())}
        for fix in least
    ]
    defaults = Recipe(model="-").model_dump(mode="json")
    others = {"hardware": given.get("hardware") or DEFAULT_HARDWARE, "memory": given.get("memory", "")}
    return {"error": f"{error.rule}.", "fixes": fixes, "said": {**defaults, **fields, **others}}


def _fixes(fields: dict[str, Any], rule: str, changed: dict[str, str]) -> Iterator[dict[str, str]]:
    """The changes proposed by the sentence of a broken `rule` after which the recipe is possible, either by
    themselves or with what the next broken rule proposes then. `changed` are the changes already made."""
    for name, value in _PROPOSED.findall(rule.partition(" is impossible: ")[2]):
        if name not in ASKED or name in changed:
            continue
        fix, fixed = {**changed, name: value}, {**fields, name: parse_yaml(value, name)}
        try:
            check_recipe(fixed, "the question")
            yield fix
        except ImpossiblePair as error:
            if len(fix) < MOST_CHANGES:
                yield from _fixes(fixed, error.rule, fix)
        except InputError:  # what matched is a word of the sentence and no value
            continue


def _fields(given: Mapping[str, str]) -> dict[str, Any]:
    """The fields of the question's recipe: those of the recipe that it names, changed by those that it sets.
    The name of a model that comes with harness is a recipe of defaults, as for the commands. Raises
    InputError."""
    name = given.get("recipe", "")
    if name and name not in _shipped() and name not in list_models():
        hint = nearest(shortened(name), recipe_names())
        raise InputError(
            f"recipe: there is no {shortened(name)!r} among those of harness.{hint} "
            "Another model is named by the field model: leave recipe out, and set model."
        )
    fields: dict[str, Any] = {**_shipped().get(name, {"model": name})} if name else {}
    for key, value in given.items():
        if key in ASKED:
            fields[key] = value if key == "model" else parse_yaml(value, f"{key}={shortened(value)}")
    return fields


def _unknown_field(name: str) -> str:
    """Why a question cannot set `name`."""
    if name in EFFECTS:
        return f"{name} is no part of a question: {EFFECTS[name].why}. Leave it out."
    hint = nearest(shortened(name), [*ASKED, *BESIDE])
    return f"a question has no {shortened(name)}.{hint} It has fields of a recipe, {', '.join(BESIDE)}."


@cache
def _card_recipes() -> tuple[str, ...]:
    """The names of the shipped recipes that are made for one card."""
    return tuple(recipe.name for recipe in list_card_recipes())


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    """The fields of every recipe that comes with harness, by its name."""
    names = [*(name for name, _ in list_recipes()), *_card_recipes()]
    return {name: load_recipe(name)[1].model_dump(mode="json") for name in names}


def _nearest_recipe(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    """The shipped recipe or the model from which `recipe` differs in the fewest fields, and these fields.

    Recipes about other models count only where none is about this model. A recipe for a card counts only if
    nothing differs, since its name promises that it fits there."""
    fields = recipe.model_dump(mode="json")
    shipped = {name: _differing(base, fields) for name, base in _shipped().items()}
    usable = {
        name: changes for name, changes in shipped.items() if not changes or name not in _card_recipes()
    }
    candidates = {name: changes for name, changes in usable.items() if "model" not in changes} or usable
    candidates[recipe.model] = _differing(Recipe(model=recipe.model).model_dump(mode="json"), fields)
    return min(candidates.items(), key=lambda candidate: len(candidate[1]))


def _differing(
    base: Mapping[str, Any], fields: Mapping[str, Any], always: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The `fields` that a question may set and that differ from `base`, and those named by `always`."""
    return {
        name: value
        for name, value in fields.items()
        if name in always or (name in ASKED and value != base[name])
    }
