"""Who may import and call what in harness/, read from the source: what keeps the house in order.

Packages are entered through their facade; every library has its home; there is one training step. That they
stand on levels, import downward only and in no circle, and that the answers never reach one another, is in
pyproject.toml for import-linter, which `make check` runs.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from pages.source import FILES, nodes, tree
from tests.support.places import ROOT

MODULES = {
    ".".join(("harness", *Path(name).with_suffix("").parts)).removesuffix(".__init__"): name for name in FILES
}

PACKAGES = {file.split("/")[0] for file in FILES if "/" in file}

WITH_TORCH = ("parallel", "training", "observe", "checkpoint", "kernels", "simulate", "measure", "loops")
"""Packages whose facade loads torch. All others start in milliseconds, and work where torch is not there."""

MOST_FILES = 20
"""In a folder: more are two rooms."""
HOUSE = ("harness", "pages", "benchmarks", "tests")

HOMES = {
    "transformers": {
        "training/model_config.py",
        "data/tokenizer.py",
        "training/refusals.py",
        "training/tiles.py",  # how LLaVA-NeXT cuts an image
        "training/toggles/attention.py",  # whether flash attention is installed
        "training/toggles/quantization.py",  # replaces layers as transformers' own loader does
        "training/toggles/chunked_loss.py",  # what a model returns that has a loss and no logits
        "loops/callbacks.py",  # a TrainerCallback
        "zeros/weights.py",  # the names and shapes of a model's weights
        "virtual_gpu/startup/virtual_gpu_weights.py",  # whose loader is given zeros
    },
    "lightning": {"loops/callbacks.py"},
    "peft": {
        "training/toggles/adapter.py",
        "training/toggles/quantization.py",
        "simulate/cuda/libraries.py",  # gives it a GPU's answers
    },
    "bitsandbytes": {
        "training/toggles/quantization.py",
        "training/toggles/optimizer.py",
        "simulate/cuda/libraries.py",  # gives it a GPU's answers
        "kernels/quantized.py",  # asks its tables which kernel runs
    },
    "liger_kernel": {"training/toggles/liger.py", "simulate/cuda/libraries.py"},
    "schedulefree": {"training/toggles/optimizer.py"},
    "galore_torch": {"training/toggles/low_rank_optimizer.py"},
    "apollo_torch": {"training/toggles/low_rank_optimizer.py"},
    "datasets": {"data/documents.py"},  # data sets of the Hub
    "accelerate": {"track/trackers.py"},  # besides, transformers needs it to load quantized checkpoints
    "mcp": {"mcp/server.py"},
    "ray": {"sweep/launchers/ray_tasks.py"},
    "submitit": {"sweep/launchers/submitit_jobs.py"},
    "torchao": {"training/toggles/optimizer.py", "training/toggles/precision.py"},
}
"""The only files that import a package, always where it is used: without it, all else works."""

USES_CUDA = {
    "loops/before_steps.py",  # what a program that dies before its first step has on its device
    "measure/devices.py",  # which device there is, and which a loop that is not ours uses
    "measure/measured_run.py",  # its cache, which an evaluation empties
    "measure/cuda.py",  # events, the driver's numbers, out of memory
    "measure/device_memory.py",  # allocator statistics, snapshots
    "measure/doctor.py",  # what this machine can do, by trying it
    "virtual_gpu/startup/virtual_gpu_out.py",  # the allocator's statistics of somebody's program
    "virtual_gpu/startup/virtual_gpu_times.py",  # which device its steps ran on
    "virtual_gpu/startup/virtual_gpu_start.py",  # whether somebody's program uses one
}
FOR_TERMINALS = {"typer", "rich"}


def imported(node: ast.AST) -> list[str]:
    """Full names of what an import statement may bring in: `from a import b` may mean the module a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute here"
        return [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


@cache
def imports_of(file: str) -> frozenset[str]:
    return frozenset(name for node in nodes(file) for name in imported(node))


def package_of(module: str) -> str:
    return module.split(".")[1]


def calls(file: str) -> Iterator[str]:
    """What is called: `f` of f(x), `.m` of any.m(x)."""
    for node in nodes(file):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield f".{node.func.attr}"


def code_lines(file: str) -> int:
    """Lines with code: neither blank, nor comment, nor docstring."""
    expressions = [node.value for node in nodes(file) if isinstance(node, ast.Expr)]
    strings = [node for node in expressions if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    documentation = {n for node in strings for n in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = FILES[file].read_text(encoding="utf-8").splitlines()
    code = [line for n, line in enumerate(lines, 1) if n not in documentation and line.strip()]
    return sum(not line.lstrip().startswith("#") for line in code)


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 100
    assert {"training/step.py", "training/loop.py", "measure/measured_run.py"} <= FILES.keys()
    assert sum(len(imports_of(file)) for file in FILES) > 200
    assert sum(1 for file in FILES for _ in calls(file)) > 1000
    assert code_lines("training/step.py") > 30


def test_packages_are_entered_by_the_front_door() -> None:
    """Whoever is outside imports from `harness.package`, and only what its facade exports."""
    exported = {
        module: {
            alias.name for node in tree(file).body if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        for module, file in MODULES.items()
        if file.endswith("__init__.py")
    }
    entered = 0
    for ours, file in MODULES.items():
        for node in nodes(file):
            if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("harness."):
                continue
            theirs = str(node.module)
            if package_of(theirs) != (package_of(ours) if ours != "harness" else None):
                entered += 1
                assert theirs.count(".") == 1, f"{file} imports from {theirs}"
                names = {alias.name for alias in node.names}
                assert names <= exported.get(theirs, names), f"{file}: {names} of {theirs}"
    assert entered > 200


def test_a_facade_exports_no_name_of_a_file_beside_it() -> None:
    """`package.name` would be the function for one importer and the module for another."""
    for file in FILES:
        if file.endswith("__init__.py"):
            exported = {alias.name for node in tree(file).body for alias in getattr(node, "names", [])}
            beside = {path.stem for path in FILES[file].parent.glob("*")}
            assert exported.isdisjoint(beside), file


def test_a_folder_is_a_room() -> None:
    rooms = [folder for part in HOUSE for folder in (ROOT / part, *(ROOT / part).rglob("*/"))]
    assert len(rooms) > 100
    for folder in rooms:
        assert len(list(folder.glob("*.py"))) <= MOST_FILES, folder


def test_a_package_states_its_charter() -> None:
    """In one sentence or a few, as the docstring of its facade."""
    for file in FILES:
        if file.endswith("__init__.py"):
            assert len(ast.get_docstring(tree(file)) or "") > 30, file


def test_terminals_are_the_business_of_the_command_line() -> None:
    users = {file for file in FILES if {name.split(".")[0] for name in imports_of(file)} & FOR_TERMINALS}
    assert users
    assert all(file.startswith("cli/") for file in users)


@pytest.mark.parametrize("package", HOMES)
def test_a_library_has_its_home(package: str) -> None:
    def belongs(name: str) -> bool:
        return name == package or name.startswith(f"{package}.")

    assert {file for file in FILES if any(map(belongs, imports_of(file)))} == HOMES[package]


def test_optional_packages_are_imported_where_they_are_used() -> None:
    for file in FILES:
        at_top = {name.split(".")[0] for node in tree(file).body for name in imported(node)}
        assert at_top.isdisjoint(HOMES), file


def test_torch_cuda_is_used_where_a_gpu_is_looked_at() -> None:
    def uses_cuda(file: str) -> bool:
        attributes = [node for node in nodes(file) if isinstance(node, ast.Attribute)]
        named = [node for node in attributes if node.attr == "cuda" and isinstance(node.value, ast.Name)]
        by_attribute = any(node.value.id == "torch" for node in named if isinstance(node.value, ast.Name))
        return by_attribute or any(name.startswith("torch.cuda") for name in imports_of(file))

    assert {file for file in FILES if uses_cuda(file)} == USES_CUDA


def test_packages_without_torch_import_none() -> None:
    """Not even through others: they are imported in a process that has no torch."""
    outside = (*WITH_TORCH, "startup")  # of virtual_gpu: what runs within the program that is watched
    free = sorted(module for module in MODULES if not {*module.split(".")} & {*outside})
    assert len(free) > 100
    program = (
        "import sys, importlib\n"
        "for name in 'torch transformers peft bitsandbytes datasets'.split(): sys.modules[name] = None\n"
        "for module in sys.argv[1:]: importlib.import_module(module); print(module)\n"
    )
    importable = [module for module in free if module != "harness.__main__"]  # which runs
    done = subprocess.run(
        [sys.executable, "-c", program, *importable], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == importable


def test_releases_are_told_apart_in_one_place() -> None:
    """By name (system/torch_release.py): whoever compares a version in place hides what differs.

    cuDNN's own version is compared where torch's C++ compares it (kernels/attention_choice.py).
    """
    version = re.compile(r"__version__|(?<!cudnn_)version\b|TorchRelease|\.torch$")

    def compares(node: ast.AST) -> bool:
        if not isinstance(node, ast.Compare) or not isinstance(
            node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE
        ):
            return False
        return any(version.search(ast.unparse(side)) for side in (node.left, *node.comparators))

    assert any(map(compares, ast.walk(ast.parse("f(gpu.torch >= (2, 15))"))))
    assert [file for file in FILES if any(map(compares, nodes(file)))] == []


def test_dtypes_have_their_names_once() -> None:
    """A recipe's name for a dtype of torch is looked up in one table."""

    def is_table(node: ast.AST) -> bool:
        values = {ast.unparse(value) for value in node.values} if isinstance(node, ast.Dict) else set()
        return {"torch.float32", "torch.bfloat16"} <= values

    assert [file for file in FILES if any(map(is_table, nodes(file)))] == ["parallel/dtypes.py"]


def test_lines_for_people_are_printed_by_one_function() -> None:
    """What files say steers no terminal: only `say` and its console may print what is given."""
    told = {
        file
        for file in FILES
        for node in nodes(file)
        if isinstance(node, ast.keyword) and node.arg == "markup"
    }
    assert told == {"cli/terminal/terminal.py"}


def test_no_tool_of_tests_runs_in_the_program() -> None:
    """What a simulation replaces, it replaces by name and with a reason (system/replacement.py)."""
    assert not [file for file in FILES if "unittest" in {name.split(".")[0] for name in imports_of(file)}]


def test_there_is_one_backward() -> None:
    assert [file for file in FILES for call in calls(file) if call == ".backward"] == ["training/step.py"]


@pytest.mark.parametrize("file", ["training/step.py", "training/loop.py"])
def test_the_step_neither_prints_nor_waits_nor_reads_back(file: str) -> None:
    forbidden = {"print", ".synchronize", ".item", ".tolist", ".cpu", ".numpy", "float", "bool", "breakpoint"}
    assert forbidden.isdisjoint(calls(file))


def test_the_step_is_short() -> None:
    assert code_lines("training/step.py") <= 60


def test_files_are_short() -> None:
    for file, path in FILES.items():
        assert len(path.read_text(encoding="utf-8").splitlines()) < 400, file


def test_a_file_that_is_named_exists() -> None:
    """In docstrings and comments, as `folder/file.py`: what has moved is named where it is now."""
    named = 0
    for file, path in FILES.items():
        for name in re.findall(
            r"(?<![\w./<-])((?:[a-z_]+/)+[a-z_]+\.py)\b", path.read_text(encoding="utf-8")
        ):
            short = name.removeprefix("harness/")
            if short.split("/")[0] in PACKAGES:
                named += 1
                assert short in FILES, f"{file} names {name}"
    assert named > 30
