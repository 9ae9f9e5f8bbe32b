"""Make the formulas that come with the recipes, so that the first question about one needs no simulation.

    python -m benchmarks.shipped_formulas [RECIPE ...]

For each of RECIPES, or those that are named: `harness formula` asks what its peak is made of, `harness
hardware` asks every kind of GPU at the recipe's own sizes, and `harness fit` what is the largest that fits
DEVICES. What they learn is written to recipes/formulas/. A formula holds for the versions of the libraries
that made it; tests/formula/test_shipped.py holds it against a simulation of today's code, and fails where it
has to be made anew.
"""

import argparse
import gzip
import json
import os
import sys
import tempfile
from pathlib import Path

from harness.allocator import parse_settings
from harness.errors import InputError
from harness.fit import compare_hardware, derive, fit_confirmed
from harness.formula.formula import Formula
from harness.formula.store import shipped_path
from harness.hardware import DEFAULT_HARDWARE, find_hardware
from harness.recipe import load_recipe
from harness.system import PACKAGE, installed_version, recipes_folder, write_whole

RECIPES = (
    "llama-3.1-8b-lora",
    "llama-3.1-8b-qlora",
    "llama-3.1-8b-full-bf16",
    "llama-3.2-1b-bf16",
    "mistral-7b-qlora",
    "qwen2.5-7b-lora",
    "tinyllama-lora",
)
"""Those that people are most likely to begin with: a formula is some kilobytes for every kind of GPU."""
DEVICES = ("h100", "rtx-4090")


def make(name: str) -> None:
    """The formulas of one recipe, on every kind of GPU."""
    _, recipe = load_recipe(name)
    settings = parse_settings("", installed_version("torch") or "")
    with tempfile.TemporaryDirectory() as kept:
        os.environ["HARNESS_CACHE"] = kept
        try:
            derive(recipe, find_hardware(DEFAULT_HARDWARE))
            compare_hardware(recipe, {})
            for device in DEVICES:
                fit_confirmed(recipe, find_hardware(device), settings)
        except InputError as error:
            print(f"{name}: {error}", file=sys.stderr)
        for file in sorted(Path(kept).rglob("*.json.gz")):
            _ship(file)


def _ship(file: Path) -> None:
    document = json.loads(gzip.decompress(file.read_bytes()))
    path = shipped_path(document["key"])
    assert Formula.from_json(document).pieces, path
    path.parent.mkdir(exist_ok=True)
    write_whole(path, file.read_bytes())
    print(f"{path.relative_to(PACKAGE.parent)}: {path.stat().st_size / 1e3:.1f} kB", flush=True)


def main() -> None:
    """Make those that are asked for; or all, and nothing else stays."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", metavar="RECIPE")
    named = parser.parse_args().recipes
    if not named:
        for old in (recipes_folder() / "formulas").glob("*.json.gz"):
            old.unlink()
    for name in named or RECIPES:
        make(name)


if __name__ == "__main__":
    main()
