"""A question as an address holds it, its recipe and device checked, and the same as a command and as YAML.

An address may be anybody's: it names only fields that change memory or time, so no code that comes with a
model, no weights and no data set are touched by asking.
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
    list_recipes,
    load_recipe,
    model_name,
    shortened,
    shown,
)
from harness.system import parse_yaml, to_yaml

_Many = Annotated[int, Field(gt=0, lt=2**31)]


class After(BaseModel):
    """As the options of `harness simulate`, with `after` for what --phases adds to train."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    after: tuple[Literal["eval", "save"], ...] = ()
    """Behind the training steps: an evaluation as transformers' Trainer does it, and its checkpoint."""
    eval_batches: _Many | None = None
    """How many batches an evaluation has; empty: 10."""
    eval_batch_size: _Many | None = None
    """Their rows, per_device_eval_batch_size; empty: 8."""
    eval_accumulation_steps: _Many | None = None
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
        """As `harness simulate` takes them."""
        words = ["--phases", ",".join(["train", *self.after])] if self.after else []
        for name, value in self.model_dump(exclude={"after"}, exclude_defaults=True).items():
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return words

    @property
    def evaluation(self) -> dict[str, tuple[str, int | bool]]:
        """Fields of an Evaluation and their values, by the names here."""
        given = dict[str, tuple[str, int | bool]]()
        for name in ("eval_batches", "eval_batch_size", "eval_accumulation_steps"):
            if getattr(self, name) is not None:
                given[name] = (name.removeprefix("eval_"), getattr(self, name))
        return given | ({"eval_loss_only": ("keep_logits", False)} if self.eval_loss_only else {})


def read_after(said: Mapping[str, str]) -> After:
    """From the fields of a question. Raises InputError for a value that cannot be, and for one that belongs
    to an evaluation or a checkpoint that is not asked for."""
    given = {name: parse_yaml(said[name], name) for name in After.model_fields if said.get(name)}
    try:
        found = After.model_validate(given)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        name, problem = str(wrong["loc"][0]), wrong["msg"][0].lower() + wrong["msg"][1:]
        raise InputError(f"{name}: {shortened(shown(given[name]))} is not possible: {problem}.") from None
    if found.evaluation and "eval" not in found.after:
        raise InputError(f"{next(iter(found.evaluation))} belongs to an evaluation. Set after: eval too.")
    if found.full_state_dict and "save" not in found.after:
        raise InputError("full_state_dict belongs to a checkpoint. Set after: save too.")
    return found


LONGEST = 4_000
"""Characters of a question."""
MOST_FIELDS = 80
HANDED = "harness-handed-"
"""How the folder of a config begins that a page was handed."""
MOST_CHANGES = 3
"""Of a fix."""
ASKED = tuple(name for name in Recipe.model_fields if name not in EFFECTS)
"""Fields of a recipe that a question may set."""
BESIDE = ("recipe", "hardware", "memory", "gpus", "tokens", *After.model_fields)
"""What else a question may say, as the commands do."""
_PROPOSED = re.compile(r"\b([a-z][a-z0-9_]*): ([\w./-]+|\[[\w, ]*\])")


@dataclass(frozen=True)
class Question:
    """Does this recipe fit this device, and how fast is it?"""

    recipe: Recipe
    hardware: Hardware
    memory: str = ""
    """Of the device, where another size than its own is asked about, as in 16GiB."""
    after: After = field(default_factory=After)
    tokens: int = 0
    """To train on, padding included; 0: of no number of them."""

    @cached_property
    def _near(self) -> tuple[str, dict[str, Any]]:
        return _nearest(self.recipe)

    @property
    def _model(self) -> str:
        """As whoever copies it has it: a config that a page was handed has its path there alone."""
        path = Path(self.recipe.model)
        return path.name if path.parent.name.startswith(HANDED) else self.recipe.model

    @property
    def name(self) -> str:
        """Of the recipe about this model that the command begins with; of none, the model's."""
        name, changes = self._near
        return model_name(changes.get("model", name))

    @property
    def command(self) -> str:
        """What `harness simulate` is asked for the same."""
        near, changes = self._near
        near = self._model if near == self.recipe.model else near
        changes = changes | ({"model": self._model} if "model" in changes else {})
        words = ["harness", "simulate", near, *(f"{name}={shown(value)}" for name, value in changes.items())]
        words.append(f"hardware={self.hardware.name}")
        words += ["--memory", self.memory] if self.memory else []
        return shlex.join([*words, *self.after.options])

    @property
    def yaml(self) -> str:
        """A recipe file: the fields that differ from the defaults."""
        defaults = Recipe(model=self.recipe.model).model_dump(mode="json")
        fields = self.recipe.model_dump(mode="json") | {"model": self._model}
        return to_yaml(_differing(defaults, fields, ("model",)))

    def as_said(self) -> dict[str, Any]:
        """Every field of the form, as it is in this question."""
        recipe = self.recipe
        beside = {"hardware": self.hardware.name, "memory": self.memory, "gpus": recipe.world_size}
        beside["tokens"] = str(self.tokens or "")
        return {**recipe.model_dump(mode="json"), **self.after.model_dump(mode="json"), **beside}


def read_question(text: str) -> Question:
    """The question of a query string, as in recipe=llama-3.1-8b-lora&seq_len=4096&hardware=rtx-4090.

    Raises InputError for what is no question, with what to write; ImpossiblePair for fields that exclude each
    other.
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
    said = dict(pairs)
    if len(said) < len(pairs):
        twice = next(name for name in said if sum(name == other for other, _ in pairs) > 1)
        raise InputError(f"the question says {shortened(twice)} twice. Keep one.")
    for name in said:
        if name not in ASKED and name not in BESIDE:
            raise InputError(_no_such(name))
    hardware = find_hardware(said.get("hardware") or DEFAULT_HARDWARE)
    memory = said.get("memory", "").strip()
    if memory:
        hardware = with_memory(hardware, parse_bytes(memory))
    recipe = check_recipe(_fields(said), "the question", [*said], "question")
    counts = read_counts(said["gpus"]) if said.get("gpus") else [1]
    if len(counts) > 1:
        raise InputError(f"gpus: {shortened(said['gpus'])}: give one number.")
    recipe = recipe if counts == [1] else among(recipe, counts[0])
    tokens = said.get("tokens", "").strip()
    return Question(
        recipe, hardware, memory, read_after(said), read_tokens(tokens, "tokens:") if tokens else 0
    )


def mistake(text: str, error: InputError) -> dict[str, Any]:
    """What is wrong with a question, and what to change in it, for a page."""
    if not isinstance(error, ImpossiblePair):
        return {"error": str(error), "fixes": []}
    said = dict(parse_qsl(text, keep_blank_values=True))
    fields = _fields(said)
    found = [*_fixes(fields, error.rule, {})]
    least = [fix for fix in found if not any(other.items() < fix.items() for other in found)]
    words = [", ".join(f"{name}: {value}" for name, value in fix.items()) for fix in least]
    fixes = [{"fields": fix, "words": word} for fix, word in zip(least, words, strict=True)]
    defaults = Recipe(model="-").model_dump(mode="json")
    beside = {"hardware": said.get("hardware") or DEFAULT_HARDWARE, "memory": said.get("memory", "")}
    return {"error": f"{error.rule}.", "fixes": fixes, "said": {**defaults, **fields, **beside}}


def _fixes(fields: dict[str, Any], rule: str, changed: dict[str, str]) -> Iterator[dict[str, str]]:
    """Of the changes that a broken rule proposes, those after which the recipe is possible: alone, or with
    what the next broken rule proposes then."""
    for name, value in _PROPOSED.findall(rule.partition(" is impossible: ")[2]):
        if name not in ASKED or name in changed:
            continue
        fix, after = {**changed, name: value}, {**fields, name: parse_yaml(value, name)}
        try:
            check_recipe(after, "the question")
            yield fix
        except ImpossiblePair as error:
            if len(fix) < MOST_CHANGES:
                yield from _fixes(after, error.rule, fix)
        except InputError:  # no value, but a word of the sentence
            continue


def _fields(said: Mapping[str, str]) -> dict[str, Any]:
    """Of the recipe: those of the named one, and those that are said. Raises InputError."""
    name = said.get("recipe", "")
    if name and name not in _shipped():
        hint = nearest(shortened(name), list(_shipped()))
        raise InputError(f"recipe: there is no {shortened(name)!r} among those of harness.{hint}")
    fields = {**_shipped()[name]} if name else {}
    for key, value in said.items():
        if key in ASKED:
            fields[key] = value if key == "model" else parse_yaml(value, f"{key}={shortened(value)}")
    return fields


def _no_such(name: str) -> str:
    if name in EFFECTS:
        return f"{name} is no part of a question: {EFFECTS[name].why}. Leave it out."
    hint = nearest(shortened(name), [*ASKED, *BESIDE])
    return f"a question has no {shortened(name)}.{hint} It has fields of a recipe, {', '.join(BESIDE)}."


@cache
def _for_cards() -> tuple[str, ...]:
    return tuple(one.name for one in list_card_recipes())


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    """The fields of every recipe that comes with harness, by its name."""
    names = [*(name for name, _ in list_recipes()), *_for_cards()]
    return {name: load_recipe(name)[1].model_dump(mode="json") for name in names}


def _nearest(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    """What a command begins with, and the fields that it changes: of the recipes of harness about the same
    model, or of all where there is none, and of the model by itself, what differs in the fewest. One for a
    card, whose name says what fits there, only if it is the very same."""
    fields = recipe.model_dump(mode="json")
    shipped = {name: _differing(other, fields) for name, other in _shipped().items()}
    usable = {name: changes for name, changes in shipped.items() if not changes or name not in _for_cards()}
    alike = {name: changes for name, changes in usable.items() if "model" not in changes} or usable
    alike[recipe.model] = _differing(Recipe(model=recipe.model).model_dump(mode="json"), fields)
    return min(alike.items(), key=lambda each: len(each[1]))


def _differing(
    base: Mapping[str, Any], fields: Mapping[str, Any], always: tuple[str, ...] = ()
) -> dict[str, Any]:
    return {
        name: value
        for name, value in fields.items()
        if name in always or (name in ASKED and value != base[name])
    }
