"""An installed harness carries what a checkout has: every module, recipe, model config and calibration."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = DECLARED["package-dir"]


def folder_of(package: str) -> Path:
    """Where setuptools takes a package from: its own folder, or its parent's and its last name."""
    parent, _, name = package.rpartition(".")
    return ROOT / FOLDERS[package] if package in FOLDERS else folder_of(parent) / name


def carried(path: Path) -> bool:
    """Whether a declared package holds this file: as a module, or by one of its patterns."""
    for package in DECLARED["packages"]:
        folder, patterns = folder_of(package), DECLARED["package-data"].get(package, ())
        if path.suffix == ".py" and path.parent == folder:
            return True
        if any(path.is_relative_to(folder) and fnmatch(str(path.relative_to(folder)), p) for p in patterns):
            return True
    return False


def tracked(folder: str) -> list[Path]:
    files = [
        path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    assert files
    return files


@pytest.mark.parametrize("folder", ["harness", "recipes"])
def test_every_file_is_in_the_wheel(folder):
    assert [path for path in tracked(folder) if not carried(path)] == []


def test_calibrations_are_in_the_wheel_and_profiles_are_not():
    assert carried(ROOT / "profiles/h200/calibration.json")
    assert not any(carried(path) for path in tracked("profiles") if path.name != "calibration.json")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The package as a wheel lays it out, away from the checkout."""
    site = tmp_path_factory.mktemp("site")
    for package in DECLARED["packages"]:
        target = site / package.replace(".", "/")
        shutil.copytree(folder_of(package), target, dirs_exist_ok=True, ignore=skipped)
    calibration = site / "harness/profiles/h200/calibration.json"
    calibration.parent.mkdir(parents=True, exist_ok=True)
    calibration.write_text('{"source": "of the installed package"}')
    return site


def skipped(_: str, names: list[str]) -> list[str]:
    return [name for name in names if name in ("__pycache__", "runs", "cpu", "published")]


def run_installed(site: Path, code: str) -> str:
    elsewhere = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.check_output([sys.executable, "-c", code], text=True, cwd=site, env=elsewhere)


def test_an_installed_package_finds_its_recipes_and_calibrations(installed):
    code = (
        "from harness.recipe_file import load_recipe, recipes_folder\n"
        "from harness.hardware import find_hardware\n"
        "print(recipes_folder())\n"
        "print(load_recipe('smoke')[1].data)\n"
        "print(find_hardware('h200').calibration.source)\n"
    )
    folder, text, source = run_installed(installed, code).splitlines()
    assert Path(folder) == installed / "harness/recipes"
    assert Path(text) == installed / "harness/recipes/data/guide.txt"
    assert source == "of the installed package"
