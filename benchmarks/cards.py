"""Whether each recipe in recipes/cards fits on the cards of its size: profiles/cards.json.

    python -m benchmarks.cards [NAME ...]

Simulates each on the smallest card of every architecture that the hardware table has of that size, with the
allocator as PyTorch sets it. With names, the others' rows stay. docs/cards.md shows it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of
from harness.allocator import parse_settings
from harness.hardware import Hardware, all_hardware
from harness.recipe import list_card_recipes, load_recipe
from harness.simulate import simulate
from harness.system import installed_version, provenance, quiet_libraries, write_whole

OUT = Path("profiles/cards.json")


def cards_of(size_gb: int, dtype: str) -> list[Hardware]:
    """The smallest card of each architecture that is sold with `size_gb` and computes in `dtype`.

    Cards of one size differ by what driver and error correction keep: 24 GB are 21.99 to 23.64 GiB.
    """
    smallest: dict[str, Hardware] = {}
    for card in all_hardware():
        kind = card.datasheet.compute_capability
        if card.datasheet.title.endswith(f" {size_gb} GB") and card.supports(dtype):
            known = smallest.get(kind, card)
            smallest[kind] = min(known, card, key=lambda one: one.memory_bytes)
    return list(smallest.values())


def rows_of(name: str, size_gb: int) -> list[dict[str, Any]]:
    """What a simulation of the recipe says on each of these cards."""
    recipe = load_recipe(name)[1]
    settings = parse_settings("", installed_version("torch") or "")
    rows: list[dict[str, Any]] = []
    for card in cards_of(size_gb, recipe.compute_dtype):
        profile = simulate(recipe, card, settings, explain_oom=False)[0]
        rows.append(
            {
                "recipe": name,
                "device": card.name,
                "memory_bytes": card.memory_bytes,
                "fits": profile.oom is None,
                "process_bytes": profile.memory.process_bytes,
                "peak_allocated_bytes": profile.memory.peak_allocated_bytes,
                "host_bytes": profile.memory.host_bytes,
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.cards", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    quiet_libraries()
    known = json.loads(given.out.read_text(encoding="utf-8"))["rows"] if given.names else []
    rows: list[dict[str, Any]] = []
    for recipe in list_card_recipes():
        if given.names and recipe.name not in given.names:
            rows += [row for row in known if row["recipe"] == recipe.name]
            continue
        rows += rows_of(recipe.name, recipe.card_gb)
        print(recipe.name, [row["fits"] for row in rows if row["recipe"] == recipe.name], flush=True)
    document = {"versions": provenance()["versions"], "rows": rows}
    write_whole(given.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
