"""Who may import and call what in harness/, read from the source: the lines that keep it three answers."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "harness"
FILES = sorted(FOLDER.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
MODULES = {
    ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in FILES
}

ANSWERS = ("napkin", "simulat", "measure")
"""How the modules of each answer begin."""

HOMES = {
    # model.py builds; quantize.py replaces layers as transformers' own loader does; tokenizer.py loads the
    # checkpoint's tokenizer
    "transformers": {"model.py", "quantize.py", "tokenizer.py"},
    "peft": {"model.py"},  # adapters, and the preparation for them
    # weights in quantize.py, states in optimizer.py; cuda_libraries.py gives them a GPU's answers
    "bitsandbytes": {"quantize.py", "optimizer.py", "cuda_libraries.py"},
    "liger_kernel": {"model.py", "cuda_libraries.py"},  # the fused loss
    "datasets": {"documents.py"},  # data sets of the Hub
    "accelerate": set(),  # transformers needs it to load quantized checkpoints
    "torchao": set(),
}
"""The only files that import a package, always where it is used: without it, all else works."""

USES_CUDA = {
    "measure.py",  # which device there is
    "measure_cuda.py",  # events, allocator statistics, snapshots
    "doctor.py",  # what this machine can do, by trying it
}

TORCH_FREE = (
    *("__init__", "alignment", "allocator*", "architecture*", "attribution", "checkpoint_files"),
    "config_check",
    *("checkpoint_recipe", "cli*", "console*", "cuda_trace", "host_memory", "leak"),
    *("documents", "errors", "files", "hardware*", "napkin*", "nvml", "oom", "provenance", "recipe*"),
    *(
        "report",
        "report.*",
        "roofline",
        "run_folder",
        "safe_pickle",
        "segment_diff",
        "snapshot*",
        "step_profile",
        "strict_yaml",
    ),
    *("garbage", "serve*", "sweep*", "tokenizer", "trace_diff*", "validate*"),
)
"""Modules that start in milliseconds and work where torch is not installed."""


def imported(node: ast.AST) -> list[str]:
    """Full names of what an import statement may bring in: `from a import b` may mean the module a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute here"
        return [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def imports_of(path: Path) -> set[str]:
    return {name for node in ast.walk(TREES[path]) for name in imported(node)}


def reached_from(module: str) -> set[str]:
    """The harness modules that `module` imports, and those that they import, and so on."""
    reached: set[str] = set()
    waiting = [module]
    while waiting:
        direct = imports_of(MODULES[waiting.pop()]) & MODULES.keys()
        waiting += direct - reached
        reached |= direct
    return reached


def calls(path: Path) -> Iterator[str]:
    """What is called: `f` of f(x), `.m` of any.m(x)."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield f".{node.func.attr}"


def code_lines(path: Path) -> int:
    """Lines with code: neither blank, nor comment, nor docstring."""
    expressions = [node.value for node in ast.walk(TREES[path]) if isinstance(node, ast.Expr)]
    strings = [node for node in expressions if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    documentation = {n for node in strings for n in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = path.read_text(encoding="utf-8").splitlines()
    code = [line for n, line in enumerate(lines, 1) if n not in documentation and line.strip()]
    return sum(not line.lstrip().startswith("#") for line in code)


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 40
    assert {"step.py", "loop.py", "model.py", "measure.py", "simulate.py"} <= {path.name for path in FILES}
    assert sum(len(imports_of(path)) for path in FILES) > 200
    assert sum(1 for path in FILES for _ in calls(path)) > 1000
    assert reached_from("harness.measure") >= {"harness.step", "harness.loop", "harness.model"}
    assert code_lines(FOLDER / "step.py") > 30


@pytest.mark.parametrize("answer", ANSWERS)
def test_no_answer_knows_another(answer: str) -> None:
    """Not even through others: they are three witnesses, and what they share is the recipe and the step."""

    def belongs(module: str) -> str | None:
        name = module.removeprefix("harness.")
        return next((answer for answer in ANSWERS if name.startswith(answer)), None)

    ours = [module for module in MODULES if belongs(module) == answer]
    assert ours
    for module in ours:
        others = {reached for reached in reached_from(module) if belongs(reached) not in (None, answer)}
        assert others == set(), module


def test_napkin_does_not_run_the_step() -> None:
    for module in MODULES:
        if module.startswith("harness.napkin"):
            assert not reached_from(module) & {"harness.step", "harness.loop", "harness.model"}, module


@pytest.mark.parametrize("package", HOMES)
def test_a_package_has_its_home(package: str) -> None:
    def belongs(name: str) -> bool:
        return name == package or name.startswith(f"{package}.")

    assert {path.name for path in FILES if any(map(belongs, imports_of(path)))} == HOMES[package]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_optional_packages_are_imported_where_they_are_used(path: Path) -> None:
    at_top = {name.split(".")[0] for node in TREES[path].body for name in imported(node)}
    assert at_top.isdisjoint(HOMES)


def test_torch_cuda_is_used_where_a_gpu_is_looked_at() -> None:
    def uses_cuda(path: Path) -> bool:
        attributes = [node for node in ast.walk(TREES[path]) if isinstance(node, ast.Attribute)]
        named = [node for node in attributes if node.attr == "cuda" and isinstance(node.value, ast.Name)]
        by_attribute = any(node.value.id == "torch" for node in named if isinstance(node.value, ast.Name))
        return by_attribute or any(name.startswith("torch.cuda") for name in imports_of(path))

    assert {path.name for path in FILES if uses_cuda(path)} == USES_CUDA


def test_torch_free_modules_import_no_torch() -> None:
    """Not even through others: they are imported in a process that has no torch."""
    names = {module: module.removeprefix("harness.").replace("harness", "__init__") for module in MODULES}
    free = sorted(m for m, name in names.items() if any(fnmatch(name, pattern) for pattern in TORCH_FREE))
    assert all(any(fnmatch(name, pattern) for name in names.values()) for pattern in TORCH_FREE)
    program = (
        "import sys, importlib\n"
        "for package in ('torch', 'transformers', 'peft', 'bitsandbytes'): sys.modules[package] = None\n"
        "for module in sys.argv[1:]: importlib.import_module(module); print(module)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *free], capture_output=True, text=True, cwd=FOLDER.parent, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == free


def test_there_is_one_backward() -> None:
    found = [path.name for path in FILES for call in calls(path) if call == ".backward"]
    assert found == ["step.py"]


@pytest.mark.parametrize("name", ["step.py", "loop.py"])
def test_the_step_neither_prints_nor_waits_nor_reads_back(name: str) -> None:
    forbidden = {"print", ".synchronize", ".item", ".tolist", ".cpu", ".numpy", "float", "bool", "breakpoint"}
    assert forbidden.isdisjoint(calls(FOLDER / name))


def test_the_step_is_short() -> None:
    assert code_lines(FOLDER / "step.py") <= 60


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 400
