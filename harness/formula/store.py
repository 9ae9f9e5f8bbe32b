"""Where formulas are kept between questions: one file each, in the user's cache; and those that come with the
recipes (benchmarks/shipped_formulas.py), which hold for the versions of libraries that they name."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from harness.architecture import find_config
from harness.errors import InputError
from harness.formula.formula import Formula
from harness.hardware import Hardware
from harness.recipe import Recipe
from harness.system import PACKAGE, PACKAGES, installed_version, recipes_folder, write_whole

SIZES = ("micro_batch_size", "seq_len")
WITHOUT_INFLUENCE = ("data", "dpo_beta", "learning_rate", "seed")
"""Fields that no request depends on."""
DECIDING = (
    "formula",
    "hardware",
    "kernel_time",
    "kernels",
    "observe",
    "parallel",
    "recipe",
    "simulate",
    "training",
)
"""Packages of harness that decide what is requested, and how long it takes."""
MAKE_REQUESTS = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "liger-kernel")
ENVIRONMENT = ("CUBLAS_WORKSPACE_CONFIG", "TORCH_CUDNN_SDPA_DEPRIORITIZED", "TORCH_DISABLE_NATIVE_JIT")


def key_of(recipe: Recipe, hardware: Hardware, rank: int = 0) -> dict[str, Any]:
    """What a formula of this recipe holds for: everything but its sizes that a request may depend on.

    Of the hardware: compute capability, multiprocessors and what cuBLAS was seen to keep; not its memory.
    Raises InputError where the model's config cannot be found.
    """
    return {
        "recipe": _deciding(recipe),
        "config": hashlib.sha256(find_config(recipe.model).read_bytes()).hexdigest(),
        "rank": rank,
        "gpu": [
            hardware.datasheet.compute_capability,
            hardware.sm_count,
            hardware.calibration.cublas_workspace_bytes,
        ],
        "versions": {name: installed_version(name) for name in PACKAGES},
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
        "code": _code(),
    }


def _deciding(recipe: Recipe) -> dict[str, Any]:
    """The fields that a request may depend on, without the sizes."""
    fields = recipe.model_dump(mode="json")
    return {name: value for name, value in fields.items() if name not in (*SIZES, *WITHOUT_INFLUENCE)}


@cache
def _code() -> str:
    """A digest of what decides here."""
    digest = hashlib.sha256()
    for package in DECIDING:
        for file in sorted((PACKAGE / package).rglob("*")):
            if file.suffix in (".py", ".json"):
                digest.update(file.read_bytes())
    return digest.hexdigest()


def folder() -> Path:
    """HARNESS_CACHE, or harness in the user's cache."""
    given = os.environ.get("HARNESS_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "harness"


def load(recipe: Recipe, hardware: Hardware, rank: int = 0) -> Formula:
    """The formula that is kept for this recipe, or comes with it, or an empty one."""
    try:
        key = key_of(recipe, hardware, rank)
    except InputError:  # the simulation will say what is wrong with the model
        return Formula({})
    kept = _read(_path(key))
    if kept is not None and kept.key == json.loads(json.dumps(key)):
        return kept
    shipped = None if any(key["environment"].values()) else _read(shipped_path(key))
    if shipped is None or not _same_libraries(shipped.key["versions"]):
        return Formula(key)
    if key["recipe"] != {**_defaults(), **shipped.key["recipe"]}:  # a default is another one since
        return Formula(key)
    shipped.key = key
    return shipped


def _read(path: Path) -> Formula | None:
    """None: there is none, or nothing that can be read, and it is made again."""
    try:
        return Formula.from_json(json.loads(gzip.decompress(path.read_bytes())))
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError):
        return None


def shipped_path(key: dict[str, Any]) -> Path:
    """Where a formula that comes with the recipes lies."""
    what = {name: key[name] for name in ("config", "rank", "gpu")}
    # a field that is new since a file was made leaves its name as it is
    defaults = _defaults()
    what["recipe"] = {n: value for n, value in key["recipe"].items() if value != defaults.get(n, ...)}
    model = Path(str(key["recipe"]["model"])).name.removesuffix(".json")
    name = f"{model}.sm_{str(key['gpu'][0]).replace('.', '')}.{_digest(what)[:12]}"
    return recipes_folder() / "formulas" / f"{name}.json.gz"


@cache
def _defaults() -> dict[str, Any]:
    """What a key's recipe has where nothing is said."""
    return {n: v for n, v in _deciding(Recipe(model="any")).items() if n != "model"}


def _same_libraries(versions: dict[str, str | None]) -> bool:
    """Whether what is installed here of the libraries that make requests is what the formula was made with.
    Where one is not installed, as in a browser, the answer is about those versions."""
    here = {name: installed_version(name) for name in MAKE_REQUESTS}
    return all(
        found is None or found.partition("+")[0] == (versions.get(name) or "").partition("+")[0]
        for name, found in here.items()
    )


def save(formula: Formula) -> None:
    """Keep what is new for the next question; without a folder that can be written to, it is not kept."""
    if not formula.key or not formula.changed:
        return
    formula.changed = False
    path = _path(formula.key)
    document = json.dumps(formula.as_json(), separators=(",", ":"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, gzip.compress(document.encode(), 6, mtime=0))
    except (OSError, InputError):
        return


def _path(key: dict[str, Any]) -> Path:
    return folder() / "formulas" / f"{_digest(key)[:32]}.json.gz"


def _digest(what: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
