"""No code of the project reads a file in a way that could run it. Read from the source."""

import json
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.support.commands import Call
from tests.support.places import ROOT
from tests.support.releases import normal, pinned
from tests.support.trust_report import Tried

FOLDERS = ("harness", "benchmarks", "docs")
RULES = "S102,S301,S302,S307,S506,S602,S604,S605,S609,TID251"
"""Ruff's, with the names that pyproject.toml bans besides: calls that run what they read."""
EXCEPTIONS = {
    # the one unpickler: it finds no names, behind a check that lets no instruction through that could
    "harness/snapshot/safe_read.py": {"TID251"},
    # what the ranks of one program tell each other by their own rendezvous, as torch.distributed's objects do
    "harness/virtual_gpu/startup/virtual_gpu_collectives.py": {"S301"},
    "harness/system/strict_yaml.py": {"S506"},  # the strict loader
}


def test_nothing_is_read_in_a_way_that_runs_it(tried: Tried) -> None:
    """As `make check` says too; here the exceptions are counted, whatever stands beside them as `noqa`."""
    command = [sys.executable, "-m", "ruff", "check", "--select", RULES, "--ignore-noqa"]
    done = subprocess.run(
        [*command, "--output-format", "json", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found: dict[str, set[str]] = {}
    for problem in json.loads(done.stdout):
        found.setdefault(str(Path(problem["filename"]).relative_to(ROOT)), set()).add(problem["code"])
    assert found == EXCEPTIONS
    banned = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    names = [*RULES.split(",")[:-1], *banned["flake8-tidy-imports"]["banned-api"]]
    files = sum(len(list((ROOT / folder).rglob("*.py"))) for folder in FOLDERS)
    tried(
        "Recipes are data",
        f"a search of {files} source files for {len(names)} kinds of calls that run what they read",
        "none but the one unpickler, which finds no names",
        times=len(names),
    )


def in_the_environment_of_make_setup() -> None:
    if Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        pytest.skip("not the environment of make setup")


def needed() -> set[str]:
    """The installed distributions that harness with its extras asks for, and those that they ask for."""
    from packaging.requirements import Requirement

    installed = {normal(d.metadata["Name"]): d.requires or [] for d in distributions()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    asked = [*project["dependencies"], *(text for extra in extras for text in extra)]
    waiting = [(Requirement(text), "") for text in asked]
    found: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        name = normal(requirement.name)
        if name not in installed or (
            requirement.marker and not requirement.marker.evaluate({"extra": extra})
        ):
            continue
        for wanted in {"", *requirement.extras}:
            if (name, wanted) not in found:
                found.add((name, wanted))
                waiting += [(Requirement(text), wanted) for text in installed[name]]
    return {name for name, _ in found}


def test_the_lock_holds_everything_that_is_installed(tried: Tried) -> None:
    """What harness needs, and what that needs in turn, is pinned in constraints.txt; but for the libraries
    of torch's CUDA build, whose versions torch itself fixes."""
    in_the_environment_of_make_setup()
    everything = {name for name in needed() if not name.startswith(("nvidia-", "cuda-")) or name in pinned()}
    assert len(everything) > 30
    missing = sorted(everything - pinned().keys())
    assert not missing, f"constraints.txt does not pin {missing}; `python -m pip freeze` has their versions"
    tried(
        "The lock", f"{len(everything)} distributions that harness needs, directly or not", "each is pinned"
    )


def test_what_runs_is_what_is_locked() -> None:
    """In the environment of `make setup` the versions are those of the lock."""
    in_the_environment_of_make_setup()
    versions = {normal(d.metadata["Name"]): d.version.partition("+")[0] for d in distributions()}
    locked = {name: pin for name, pin in pinned().items() if name in versions}
    assert {name: versions[name] for name in locked} == locked


def test_a_recipe_cannot_name_code(tmp_path: Path, call: Call, tried: Tried) -> None:
    """YAML that would run with an unsafe loader, as a whole command sees it."""
    canary = tmp_path / "canary"
    attacks = [
        f"model: !!python/object/apply:os.system ['touch {canary}']",
        f"model: !!python/object/apply:builtins.open [{canary}, w]",
        "model: !!python/name:os.system",
        "model: !!python/module:os",
        f"!!python/object/new:os.system ['touch {canary}']",
        "model: &a [*a, *a]",
        "? !!python/tuple [1, 2]\n: x",
        "<<: *base",
        "%TAG ! tag:yaml.org,2002:python/\n---\nmodel: !name:os.system",
    ]
    for text in attacks:
        (tmp_path / "evil.yaml").write_text(text + "\n")
        status, out, err = call("recipes", "show", tmp_path / "evil.yaml")
        assert (status, out, err.count("\n")) == (2, "", 1), text
        assert not canary.exists()
    fault = "YAML tags and aliases that make an unsafe loader run code"
    tried("Recipes are data", fault, "exit 2, nothing runs", times=len(attacks))
