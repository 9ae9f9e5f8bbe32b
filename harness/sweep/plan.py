"""The plan of a sweep: a base recipe, the fields that change, and a cell for each recipe to ask about.

`harness sweep RECIPE key=v1,v2 ...`: by default one field changes at a time from the base recipe, which is a
cell of its own; with `grid` every combination is a cell. Imports no torch.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from harness.architecture import with_attention
from harness.data import check_data
from harness.errors import InputError
from harness.hardware import DEFAULT_HARDWARE, find_hardware
from harness.recipe import ImpossiblePair, Recipe, load_recipe, no_field, shortened
from harness.system import parse_yaml

Kind = Literal["napkin", "simulated", "measured"]
HARDWARE = "hardware"
LISTS = ("offload", "lora_targets")
MOST_CELLS = 10_000
ASKED_OF_DATA = {"data", "packing", "model", "weights"}
"""The fields that decide whether the data can be used."""


@dataclass(frozen=True)
class Cell:
    """One recipe on one device. `recipe` is None when the fields exclude each other: `refusal` says why."""

    changes: dict[str, Any]
    """The swept fields as this cell has them; empty for the base."""
    recipe: Recipe | None
    hardware: str | None
    """A device of the hardware table; None for a measurement, which runs on this machine."""
    refusal: str | None = None

    @property
    def label(self) -> str:
        """The changes as one types them on the command line; "base" for none."""
        return ", ".join(f"{name}={spelled(value)}" for name, value in self.changes.items()) or "base"


@dataclass(frozen=True)
class Plan:
    """The cells of a sweep, in the order in which they are asked."""

    name: str
    kind: Kind
    grid: bool
    base: dict[str, Any]
    """The base recipe with every field; with `grid`, the swept fields are left out."""
    axes: dict[str, list[Any]]
    """The values of each swept field, as given."""
    hardware: str | None
    """The hardware of the base; None for measurements."""
    cells: list[Cell] = field(default_factory=list[Cell])


def plan_sweep(source: str, arguments: Sequence[str], kind: Kind, *, grid: bool = False) -> Plan:
    """The sweep of the recipe `source` over the arguments with several values; the others change the base.

    Raises InputError for an unknown field or value, for nothing to sweep, and for a base recipe that is
    impossible or has data that cannot be used. A combination of which that holds is a cell with a refusal.
    """
    given = _values(arguments)
    axes = {name: values for name, values in given.items() if len(values) > 1}
    fixed = {name: values[0] for name, values in given.items() if len(values) == 1}
    if not axes:
        raise InputError(
            "nothing is swept: give at least one field several values, for example micro_batch_size=1,2,4."
        )
    if kind == "measured" and HARDWARE in given:
        raise InputError(
            "hardware= is for predictions, and --measure runs on this machine. "
            "Leave it out (--device chooses among this machine's GPUs), or leave out --measure."
        )
    cells = _cells(source, fixed, axes, kind, grid)
    name = load_recipe(source)[0]
    recipe = next((cell.recipe for cell in cells if cell.recipe is not None), None)
    if recipe is None:
        raise InputError(f"every combination is impossible. The first: {cells[0].refusal}.")
    base = recipe.model_dump(mode="json")
    if grid:
        base = {field: value for field, value in base.items() if field not in axes}
    return Plan(name, kind, grid, base, axes, cells[0].hardware, cells)


def spelled(value: Any) -> str:
    """A value as one types it on the command line: true, none, activations+optimizer."""
    if isinstance(value, list | tuple):
        return "+".join(map(str, cast("list[Any]", value))) or "none"
    return value if isinstance(value, str) else json.dumps(value)


def _values(arguments: Sequence[str]) -> dict[str, list[Any]]:
    """The values of every `key=v1,v2,...`, as YAML reads them."""
    given: dict[str, list[Any]] = {}
    known = [*Recipe.model_fields, HARDWARE]
    for text in arguments:
        name, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not name or not all(value.strip() for value in values.split(",")):
            raise InputError(
                f"{shortened(text)!r} is not key=v1,v2,... Write for example micro_batch_size=1,2,4."
            )
        if name not in known:
            raise InputError(f"command line: {no_field(name, known, ' `harness schema` lists the fields.')}")
        if name in given:
            raise InputError(f"{name} is given twice. Write all its values once: {name}=v1,v2,...")
        listed = parse_yaml(f"[{values}]", f"the value of {shortened(text)!r}")
        if name in LISTS:
            listed = [v.split("+") if isinstance(v, str) and "+" in v else v for v in listed]
        given[name] = [value for n, value in enumerate(listed) if value not in listed[:n]]
    return given


def _cells(
    source: str, fixed: Mapping[str, Any], axes: Mapping[str, list[Any]], kind: Kind, grid: bool
) -> list[Cell]:
    defaults = {} if kind == "measured" else {HARDWARE: axes.get(HARDWARE, [DEFAULT_HARDWARE])[0]}
    settled = {**defaults, **fixed}
    if grid:
        count = math.prod(map(len, axes.values()))
        if count > MOST_CELLS:
            raise InputError(f"--grid makes {count:,} cells of these values; at most {MOST_CELLS:,} are run.")
        combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    else:
        combinations = [{}, *({name: value} for name, values in axes.items() for value in values)]
    cells: list[Cell] = []
    refusals: dict[Any, str | None] = {}
    for changes in combinations:
        cell = _with_data_checked(_cell(source, settled, changes), refusals)
        if cell.refusal is not None and not changes:
            raise InputError(f"the base recipe is impossible: {cell.refusal}.")
        again = any((other.recipe, other.hardware) == (cell.recipe, cell.hardware) for other in cells)
        if cell.recipe is None or not again:
            cells.append(cell)
    return cells


def _cell(source: str, settled: Mapping[str, Any], changes: Mapping[str, Any]) -> Cell:
    fields = {**settled, **changes}
    hardware = fields.pop(HARDWARE, None)
    if hardware is not None:
        hardware = find_hardware(str(hardware)).name
    try:
        recipe = load_recipe(source, [f"{name}={json.dumps(value)}" for name, value in fields.items()])[1]
        recipe = with_attention(recipe)
    except ImpossiblePair as error:
        return Cell(dict(changes), None, hardware, error.rule)
    resolved = {**recipe.model_dump(mode="json"), HARDWARE: hardware}
    return Cell({name: resolved[name] for name in changes}, recipe, hardware)


def _with_data_checked(cell: Cell, refusals: dict[Any, str | None]) -> Cell:
    """The cell, refused if its data cannot be used because of swept fields; raises InputError if that is so
    without them.

    `refusals`: the answers about other cells' data, by their fields, so that files are read once.
    """
    if cell.recipe is None:
        return cell
    fields = tuple(getattr(cell.recipe, name) for name in sorted(ASKED_OF_DATA))
    if fields not in refusals:
        try:
            check_data(cell.recipe)
            refusals[fields] = None
        except InputError as error:
            if not ASKED_OF_DATA & cell.changes.keys():
                raise
            refusals[fields] = str(error).removesuffix(".")
    if refusals[fields] is None:
        return cell
    return Cell(cell.changes, None, cell.hardware, refusals[fields])
