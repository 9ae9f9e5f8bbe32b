"""`harness.fit`, `formula`, `shard` and `hardware`: what of a recipe fits a device, what each byte of its
peak is, how it divides among several devices, and which device to take.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.allocator import allocator_settings
from harness.api.arguments import AnyRecipe, DeviceName, asked_hardware, asked_recipe, checked
from harness.errors import InputError
from harness.fit import (
    ConfirmedFit,
    DerivedFormula,
    Divisions,
    Offer,
    compare_hardware,
    derive,
    divisions,
    fit_confirmed,
    fit_document,
    fit_lines,
    render_choice,
)
from harness.fit import fit as by_arithmetic
from harness.hardware import DEFAULT_HARDWARE, Hardware, read_prices
from harness.recipe import Recipe
from harness.system import notebook_html, quiet_libraries

MARGIN = 0.05
"""The fraction of the memory that arithmetic leaves to fragmentation, as `harness fit --margin` has it."""


@dataclass(frozen=True)
class FitAnswer:
    """What of a recipe fits a device. `print` shows what `harness fit` prints."""

    name: str
    where: str
    """What it is to fit, in words: the device, or the size of the memory that was asked about."""
    recipe: Recipe
    hardware: Hardware
    found: ConfirmedFit
    """Everything that was found, with the profiles of what was simulated."""

    @property
    def micro_batch_size(self) -> int:
        """The largest micro batch that fits at the recipe's seq_len; 0 where not even one row does."""
        return self.as_json()["largest_micro_batch_size"]

    @property
    def seq_len(self) -> int:
        """The longest sequence that fits at the recipe's micro_batch_size; 0 where none does."""
        return self.as_json()["largest_seq_len"]

    @property
    def seen(self) -> bool:
        """Whether simulations found the sizes; if not, they are estimates by arithmetic."""
        return self.found.seen

    @property
    def together(self) -> str:
        """Overrides with which the recipe fits where it does not as it is; empty where none were found."""
        return self.found.together

    def as_json(self) -> dict[str, Any]:
        """What `harness fit --json` prints, as plain data."""
        return fit_document(self.name, self.where, self.recipe, self.found)

    def __str__(self) -> str:
        return "\n".join(fit_lines(self.name, self.where, self.recipe, self.hardware, self.found))

    def _repr_html_(self) -> str:
        rows = [
            ("largest", "seen by a simulation" if self.seen else "by arithmetic"),
            ("micro_batch_size", str(self.micro_batch_size or "none fits")),
            ("seq_len", str(self.seq_len or "none fits")),
        ]
        changes = [
            ("change", "saves GiB", "time a token"),
            *(
                (change.overrides, f"{change.saved_bytes / 2**30:.2f}", f"× {change.slowdown:.2f}")
                for change in self.found.changes
            ),
        ]
        notes = [f"It fits with {self.together}."] if self.together else []
        notes += [note for note in (self.found.unsimulated, *self.found.notes) if note]
        return notebook_html(f"{self.name} on {self.where}", [rows, changes], notes)


@checked
def fit(
    recipe: AnyRecipe,
    *,
    hardware: DeviceName = DEFAULT_HARDWARE,
    memory: str | int | None = None,
    quick: bool = False,
    margin: float = MARGIN,
    **overrides: Any,
) -> FitAnswer:
    """The largest micro batch and sequence that a simulation sees to fit, or what to change if none does.

    `recipe`, `hardware`, `memory` and `overrides` as in harness.napkin. `quick`: by arithmetic alone, in
    milliseconds and without PyTorch. `margin`: the fraction of the memory that arithmetic leaves to
    fragmentation. Raises InputError for wrong arguments, and for what neither answer can tell.
    """
    name, loaded = asked_recipe(recipe, overrides)
    device = asked_hardware(hardware, memory)
    size = f"{memory:,} B" if isinstance(memory, int) else memory
    where = device.datasheet.title if size is None else size
    if quick:
        found = ConfirmedFit.by_arithmetic(by_arithmetic(loaded, device, margin=margin))
    else:
        quiet_libraries()
        found = fit_confirmed(loaded, device, allocator_settings(os.environ), margin=margin)
    return FitAnswer(name, where, loaded, device, found)


@dataclass(frozen=True)
class Offers:
    """What every device of the table does with a recipe. `print` shows what `harness hardware` prints."""

    name: str
    recipe: Recipe
    offers: list[Offer]
    """The cheapest first where there are prices, then the fastest; those that cannot run it last."""
    tokens: int
    """The number of tokens to train on, whose hours and cost are told; 0 where none was given."""

    def as_json(self) -> dict[str, Any]:
        """The recipe's name, and what `harness hardware --json` prints, as plain data."""
        return {"recipe": self.name, "offers": [offer.document(self.tokens) for offer in self.offers]}

    def __str__(self) -> str:
        return render_choice(self.name, self.offers, self.recipe.unit, self.tokens)


@checked
def hardware(
    recipe: AnyRecipe,
    *,
    prices: Mapping[str, float] | None = None,
    best: bool = False,
    tokens: int | None = None,
    **overrides: Any,
) -> Offers:
    """Every device of the table: whether the recipe fits, how fast it is, and with prices what a token costs.

    `recipe` and `overrides` as in harness.napkin. `prices`: of an hour, by device. `best`: each device with
    the micro batch and toggles with which it is the fastest, and so the cheapest a token; takes a minute.
    `tokens`: to train on, padding included: the hours and the cost of all of them. Raises InputError for
    wrong arguments.
    """
    if tokens is not None and tokens < 1:
        raise InputError(f"tokens={tokens}: give the number of tokens to train on, as in 35_000_000.")
    given = read_prices(None, [f"{name}={price}" for name, price in (prices or {}).items()])
    name, loaded = asked_recipe(recipe, overrides)
    quiet_libraries()
    return Offers(name, loaded, compare_hardware(loaded, given, best=best), tokens or 0)


@checked
def formula(
    recipe: AnyRecipe,
    *,
    hardware: DeviceName = DEFAULT_HARDWARE,
    memory: str | int | None = None,
    **overrides: Any,
) -> DerivedFormula:
    """The peak as a sum of terms in batch and sequence, each with its size and module: from simulated steps.

    `recipe`, `hardware`, `memory` and `overrides` as in harness.napkin. The answer says for which batches and
    sequences it is exact. Raises InputError for wrong arguments, and a recipe that cannot be simulated.
    """
    name, loaded = asked_recipe(recipe, overrides)
    quiet_libraries()
    return derive(loaded, asked_hardware(hardware, memory), name)


@checked
def shard(
    recipe: AnyRecipe,
    *,
    gpus: int = 8,
    group: int = 8,
    hardware: DeviceName = DEFAULT_HARDWARE,
    memory: str | int | None = None,
    **overrides: Any,
) -> Divisions:
    """Memory and communication of each of `gpus` GPUs under DDP, FSDP2, ZeRO and every other way to divide.

    `recipe`, `hardware`, `memory` and `overrides` as in harness.napkin. `group`: how many GPUs have fast
    links to each other, for hybrid sharding. Raises InputError for wrong arguments, and a recipe that
    offloads.
    """
    name, loaded = asked_recipe(recipe, overrides)
    quiet_libraries()
    return divisions(name, loaded, asked_hardware(hardware, memory), gpus, group)
