"""No code of the project reads a file in a way that could run it. Read from the source."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from harness.cli.app import main
from tests.support.places import ROOT
from tests.support.trust_report import Tried

FOLDERS = ("harness", "benchmarks", "docs")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}

RUNS_DATA = {
    *("eval", "exec", "__import__", "pickle.load", "pickle.loads", "pickle.Unpickler"),
    *(
        "marshal.load",
        "marshal.loads",
        "shelve.open",
        "dill.load",
        "dill.loads",
        "joblib.load",
        "runpy.run_path",
    ),
    *("torch.load", "torch.jit.load", "torch.package.PackageImporter", "yaml.unsafe_load", "yaml.full_load"),
    *("yaml.unsafe_load_all", "yaml.load_all", "os.system", "os.popen", "subprocess.getoutput"),
    *("numpy.load", "np.load", "pandas.read_pickle", "code.interact", "builtins.eval", "builtins.exec"),
}
"""Calls that run what they read, or can be told to by what they read."""
HOMES = {
    # the one unpickler: it finds no names, behind a check that lets no instruction through that could
    "pickle.Unpickler": {"safe_read.py"},
    # what the ranks of one program tell each other by their own rendezvous, as torch.distributed's objects do
    "pickle.loads": {"virtual_gpu_collectives.py"},
}
MODULES = {name.partition(".")[0] for name in RUNS_DATA if "." in name} - {"os", "subprocess", "torch"}


def dotted(node: ast.AST) -> str:
    """`a.b.c` for attributes of a name, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        start = dotted(node.value)
        return f"{start}.{node.attr}" if start else ""
    return ""


def references(tree: ast.AST) -> Iterator[str]:
    """Every name that is called, passed on, subclassed or imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield dotted(node)
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


REFERENCES = {path: set(references(tree)) for path, tree in TREES.items()}


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 120
    assert "pickle.Unpickler" in set(references(TREES[ROOT / "harness" / "snapshot" / "safe_read.py"]))
    found = set(
        references(ast.parse("from torch import load\nimport pickle\nf = pickle.loads\nx = eval('1')"))
    )
    assert {"torch.load", "pickle.loads", "eval"} <= found


@pytest.mark.parametrize("name", sorted(RUNS_DATA))
def test_nothing_is_read_in_a_way_that_runs_it(name: str) -> None:
    users = {path.name for path, found in REFERENCES.items() if name in found}
    assert users == HOMES.get(name, set())


def test_modules_that_run_data_keep_their_names() -> None:
    """`import pickle as p` would slip by the test above."""
    renamed = [
        (path.name, alias.name)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.partition(".")[0] in MODULES and alias.asname not in (None, "np")
    ]
    assert renamed == []


def test_yaml_is_loaded_by_the_strict_loader_alone() -> None:
    calls = [(path, node) for path, tree in TREES.items() for node in ast.walk(tree)]
    loads = [
        (path.name, ast.unparse(node))
        for path, node in calls
        if isinstance(node, ast.Call) and re.fullmatch(r"yaml\.\w*load\w*", dotted(node.func))
    ]
    assert loads == [("strict_yaml.py", "yaml.load(text, Loader=_Loader)")]


def test_no_shell_reads_a_command(tried: Tried) -> None:
    through_a_shell = [
        (path.name, node.lineno)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "shell" and ast.unparse(node.value) != "False"
    ]
    assert through_a_shell == []
    tried(
        "Recipes are data",
        f"a search of {len(FILES)} source files for {len(RUNS_DATA)} calls that run what they read",
        "none but the one unpickler, which finds no names",
        times=len(RUNS_DATA),
    )


def pinned() -> dict[str, str]:
    """Name and version of every distribution in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = (re.match(r"([A-Za-z0-9._-]+)==([^ ;]+)", line) for line in lines)
    return {normal(match[1]): match[2] for match in found if match}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


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


def test_a_recipe_cannot_name_code(tmp_path: Path, monkeypatch, capfd, tried: Tried) -> None:
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
        monkeypatch.setattr(sys, "argv", ["harness", "recipes", "show", str(tmp_path / "evil.yaml")])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert (ended.value.code, out, err.count("\n")) == (2, "", 1), text
        assert not canary.exists()
    fault = "YAML tags and aliases that make an unsafe loader run code"
    tried("Recipes are data", fault, "exit 2, nothing runs", times=len(attacks))
