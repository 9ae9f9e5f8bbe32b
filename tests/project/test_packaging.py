"""A wheel of harness carries what a checkout has: every module, recipe, model config and calibration."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import harness
from tests.support.places import ROOT

CALIBRATION = "profiles/h200/calibration.json"


def tracked(folder: str) -> list[str]:
    listed = subprocess.check_output(["git", "ls-files", folder], text=True, cwd=ROOT).splitlines()
    return [file for file in listed if (ROOT / file).exists()]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the checkout's tracked files, and of a calibration beside them, as pip would unpack it."""
    copy, site = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("site")
    for file in [*tracked("."), CALIBRATION]:
        text = (ROOT / file).read_bytes() if file != CALIBRATION else b'{"source": "of the wheel"}'
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        (copy / file).write_bytes(text)
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(site)], check=True, capture_output=True, cwd=copy)
    (wheel,) = site.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(site)
    return site


@pytest.mark.parametrize(("folder", "inside"), [("harness", ""), ("recipes", "harness/")])
def test_every_file_is_in_the_wheel(folder: str, inside: str, site: Path) -> None:
    files = tracked(folder)
    assert len(files) > 20
    assert [file for file in files if not (site / f"{inside}{file}").is_file()] == []


def test_calibrations_are_in_the_wheel_and_profiles_are_not(site: Path) -> None:
    carried = [path for path in (site / "harness/profiles").rglob("*") if path.is_file()]
    assert site / f"harness/{CALIBRATION}" in carried
    assert {path.name for path in carried} == {"calibration.json"}


def test_nothing_else_is_in_the_wheel(site: Path) -> None:
    assert {path.name.split("-")[0] for path in site.iterdir()} == {"harness", "finetune_harness"}


def test_the_wheel_says_whose_what_it_carries_is(site: Path) -> None:
    """Files of others lie beside their licences; what NOTICE speaks of is there."""
    (information,) = site.glob("*.dist-info")
    licences = {path.name for path in information.rglob("licenses/**/*") if path.is_file()}
    assert licences == {"LICENSE", "NOTICE", "chart.LICENSE.md"}
    notice = (information / "licenses/NOTICE").read_text(encoding="utf-8")
    sources = json.loads((site / "harness/kernel_time/parameters.json").read_text(encoding="utf-8"))[
        "sources"
    ]
    assert [source for source in sources if source not in notice] == []
    minified = [path.name for path in (site / "harness/report/assets").glob("*.min.js")]
    assert [name for name in minified if name not in notice] == []
    assert (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").count(f"## {harness.__version__}") == 1


def test_an_installed_package_finds_its_recipes_and_calibrations(site: Path) -> None:
    code = (
        "from harness.hardware import find_hardware\n"
        "from harness.recipe import load_recipe\n"
        "from harness.system import recipes_folder\n"
        "print(recipes_folder())\n"
        "print(load_recipe('smoke')[1].data)\n"
        "print(find_hardware('h200').calibration.source)\n"
    )
    elsewhere = {**os.environ, "PYTHONPATH": str(site)}
    told = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=site, env=elsewhere)
    folder, text, source = told.splitlines()
    assert Path(folder) == site / "harness/recipes"
    assert Path(text) == site / "harness/recipes/data/guide.txt"
    assert source == "of the wheel"
