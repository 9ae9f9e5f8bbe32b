"""Formulas on disk. What was derived on this computer lies in the user's cache, one file for each formula.

Others come with the recipes (benchmarks/shipped_formulas.py), and hold for the library versions they name.
"""

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
"""Recipe fields that a formula has as variables."""
WITHOUT_INFLUENCE = ("data", "dpo_beta", "learning_rate", "seed")
"""Recipe fields that no memory request depends on."""
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
"""Packages of harness whose code decides what is requested and how long it takes. A change of their code
makes every cached formula unknown again."""
MAKE_REQUESTS = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "liger-kernel")
"""Libraries that request memory, so that a shipped formula holds for their versions alone."""
ENVIRONMENT = ("CUBLAS_WORKSPACE_CONFIG", "TORCH_CUDNN_SDPA_DEPRIORITIZED", "TORCH_DISABLE_NATIVE_JIT")
"""Environment variables that change what is requested."""


def key_of(recipe: Recipe, hardware: Hardware, rank: int = 0) -> dict[str, Any]:
    """Everything that a request of this recipe may depend on, but the sizes: what a formula of it holds for.

    Of the hardware these are compute capability, number of multiprocessors and the measured cuBLAS workspace,
    and not the memory. Raises InputError where the model's config cannot be found.
    """
    return {
        "recipe": _deciding(recipe),
        "config": hashlib.sha256(find_config(recipe.model).read_bytes()).hexdigest(),
        "rank": rank,
        "gpu": [
            hardware.datasheet.compute_capability,
            hardware.sm_count,
            hardware.calibration.cublas_workspace_bytes,
            # what compiling measures is measured beside as much as the L2 cache
            *([hardware.datasheet.l2_bytes] if recipe.flex else []),
        ],
        "versions": {name: installed_version(name) for name in PACKAGES},
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
        "code": _code(),
    }


def _deciding(recipe: Recipe) -> dict[str, Any]:
    """The recipe's fields that a request may depend on, without the sizes."""
    fields = recipe.model_dump(mode="json")
    return {name: value for name, value in fields.items() if name not in (*SIZES, *WITHOUT_INFLUENCE)}


@cache
def _code() -> str:
    """A digest of the code in the DECIDING packages."""
    digest = hashlib.sha256()
    for package in DECIDING:
        for file in sorted((PACKAGE / package).rglob("*")):
            if file.suffix in (".py", ".json"):
                digest.update(file.read_bytes())
    return digest.hexdigest()


def folder() -> Path:
    """The folder of the cache: HARNESS_CACHE if it is set, else `harness` in the user's cache folder."""
    given = os.environ.get("HARNESS_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "harness"


def load(recipe: Recipe, hardware: Hardware, rank: int = 0) -> Formula:
    """The cached formula of this recipe, or else the one that is shipped with it, or else an empty one."""
    try:
        key = key_of(recipe, hardware, rank)
    except InputError:  # the simulation will say what is wrong with the model
        return Formula({})
    cached = _read(_path(key))
    if cached is not None and cached.key == json.loads(json.dumps(key)):
        return cached
    shipped = None if any(key["environment"].values()) else _read(shipped_path(key))
    if shipped is None or not _same_libraries(shipped.key["versions"]):
        return Formula(key)
    if key["recipe"] != {**_defaults(), **shipped.key["recipe"]}:  # a field's default has changed since
        return Formula(key)
    shipped.key = key
    return shipped


def _read(path: Path) -> Formula | None:
    """The formula in this file. None where there is none or it cannot be read: then it is derived again."""
    try:
        return Formula.from_json(json.loads(gzip.decompress(path.read_bytes())))
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError):
        return None


def shipped_path(key: dict[str, Any]) -> Path:
    """The file of the formula with this key among those that are shipped with the recipes."""
    parts = {name: key[name] for name in ("config", "rank", "gpu")}
    # only fields that differ from their defaults, so that a new field does not change the name of a file
    defaults = _defaults()
    parts["recipe"] = {n: value for n, value in key["recipe"].items() if value != defaults.get(n, ...)}
    model = Path(str(key["recipe"]["model"])).name.removesuffix(".json")
    name = f"{model}.sm_{str(key['gpu'][0]).replace('.', '')}.{_digest(parts)[:12]}"
    return recipes_folder() / "formulas" / f"{name}.json.gz"


@cache
def _defaults() -> dict[str, Any]:
    """The recipe part of a key where every field has its default."""
    return {n: v for n, v in _deciding(Recipe(model="any")).items() if n != "model"}


def _same_libraries(versions: dict[str, str | None]) -> bool:
    """Whether the installed libraries of MAKE_REQUESTS have the versions that a formula was made with. One
    that is not installed (in a browser) does not count: the answer is then about the formula's versions."""
    installed = {name: installed_version(name) for name in MAKE_REQUESTS}
    return all(
        here is None or here.partition("+")[0] == (versions.get(name) or "").partition("+")[0]
        for name, here in installed.items()
    )


def save(formula: Formula) -> None:
    """Write a changed formula to the cache. Where the cache cannot be written to, nothing happens."""
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
