"""The derived formula held against the simulation at sizes that it was not derived at.

  python -m benchmarks.formula --sizes 200

For each recipe: derive the formula, draw that many sizes at random in the range that it states, simulate
each, and compare allocated and reserved peaks. Writes profiles/formula.json, which docs/formula.md quotes.
"""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of
from harness.allocator import parse_settings
from harness.fit import derive
from harness.formula import Piece, Point, outcome_of
from harness.hardware import PLENTY_BYTES, find_hardware, with_memory
from harness.recipe import Recipe, load_recipe
from harness.simulate import simulate
from harness.system import installed_version, provenance, quiet_libraries, write_whole

RECIPES = {
    "llama-3.1-8b-lora": {"micro_batch_size": 4, "seq_len": 2048},
    "llama-3.2-1b-bf16": {"micro_batch_size": 4, "seq_len": 1024},
    "mistral-7b-qlora": {"micro_batch_size": 2, "seq_len": 1024},
}
OUT = Path("profiles/formula.json")
H100 = find_hardware("h100")


def drawn(piece: Piece, count: int, seed: str) -> list[Point]:
    """Sizes within the range of a piece, none at which it was derived, each once."""
    rows, tokens = zip(*piece.points, strict=True)
    step = piece.sequence_step
    every = [
        Point(batch, length)
        for batch in range(min(rows), max(rows) + 1)
        for length in range(min(tokens), max(tokens) + 1, step)
    ]
    candidates = [point for point in every if piece.knows(point) and point not in piece.points]
    return random.Random(seed).sample(candidates, min(count, len(candidates)))


def held(name: str, sizes: int) -> dict[str, Any]:
    """A recipe's formula, and what comparing it gave."""
    recipe = load_recipe(name, RECIPES[name])[1]
    found = derive(recipe, H100)
    worst, took = {"allocated": 0, "reserved": 0}, {"formula": 0.0, "simulation": 0.0}
    points = drawn(found.piece, sizes, name)
    for point in points:
        asked = recipe.model_copy(update=point._asdict())
        for kind, size_bytes in apart(found.piece, asked, point, took).items():
            worst[kind] = max(worst[kind], size_bytes)
    return {
        "recipe": name,
        "text": str(replace(found, name=name)).split("\n"),
        "sizes_compared": len(points),
        "largest_difference_bytes": worst,
        "simulation_over_formula_time": round(took["simulation"] / took["formula"], 1),
    }


def apart(piece: Piece, recipe: Recipe, point: Point, took: dict[str, float]) -> dict[str, int]:
    """Bytes between formula and simulation at one size; adds the seconds of both to `took`."""
    settings, plenty = parse_settings("", installed_version("torch") or ""), with_memory(H100, PLENTY_BYTES)
    start = time.perf_counter()
    outcome = outcome_of(piece.at(point), recipe, plenty, settings)
    middle = time.perf_counter()
    memory = simulate(recipe, plenty, settings, explain_oom=False)[0].memory
    took["formula"] += middle - start
    took["simulation"] += time.perf_counter() - middle
    return {
        "allocated": abs(outcome.allocated_bytes - (memory.peak_allocated_bytes or 0)),
        "reserved": abs(outcome.reserved_bytes - (memory.peak_reserved_bytes or 0)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.formula", __doc__)
    parser.add_argument("--sizes", type=int, default=200)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    quiet_libraries()
    rows = []
    for name in RECIPES:
        rows.append(held(name, given.sizes))
        print(name, rows[-1]["sizes_compared"], rows[-1]["largest_difference_bytes"], flush=True)
    versions = provenance()["versions"]
    write_whole(
        given.out, json.dumps({"hardware": "h100", "versions": versions, "recipes": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
