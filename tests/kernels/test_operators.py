"""What one operator does on CUDA stands in one place; a product's workspace is counted once."""

import ast
import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.hardware.hardware import find_hardware
from harness.kernel_time import memory
from harness.kernels.cost import NOTHING, operator_bytes, operator_cost
from harness.kernels.gpu import NATIVE_JIT_DISABLED, Gpu
from harness.kernels.operators import OPERATORS, declare, script_of
from harness.kernels.script import Keep, Take
from harness.observe.flops import FORMULAS
from harness.simulate.cuda.behaviour import CudaRules
from harness.system import TorchRelease
from pages.source import FILES, nodes
from tests.support.tiny import tiny

aten = torch.ops.aten
MIB = 1 << 20
TABLES = {
    "observe/flops.py",  # FLOPs, which real runs count too
    "observe/storage_tracker.py",  # what autograd does in place without a dispatch mode: on any device
    "simulate/cuda/known_values.py",  # whose outputs are as large as the values say
    "kernel_time/trace.py",  # as a profiler on a GPU writes them
}
"""Files of harness/ that hold a table keyed by operators, beside the declarations in kernels/."""


def _names_an_operator(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.match(r"aten\.[a-z_]\w+(\.\w+)?$|[a-z]+::[a-z_]\w+$", node.value) is not None
    return isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("aten.", "torch.ops."))


def _tables(found: Iterable[ast.AST]) -> list[str]:
    """The displays (dicts by their keys, sets, lists, tuples) with two operators or more."""
    tables = []
    for node in found:
        if isinstance(node, ast.Dict | ast.Set | ast.List | ast.Tuple):
            items = node.keys if isinstance(node, ast.Dict) else node.elts
            if sum(item is not None and _names_an_operator(item) for item in items) >= 2:
                tables.append(ast.unparse(node))
    return tables


def test_there_is_no_second_table_of_operators() -> None:
    assert len(FILES) > 100
    assert {file for file in FILES if _tables(nodes(file))} == TABLES


def test_an_operator_is_declared_once() -> None:
    with pytest.raises(AssertionError, match="aten::mm is declared twice"):
        declare("mm", nothing="no kernel")


def test_flops_go_by_the_names_of_the_registry() -> None:
    """But for what a simulated GPU never runs: kernels of the CPU, and of other versions of bitsandbytes."""
    elsewhere = {name for name in FORMULAS if "_for_cpu" in name}
    elsewhere |= {f"bitsandbytes::{name}" for name in ("int8_linear_matmul", "int8_scaled_mm", "gemv_4bit")}
    assert FORMULAS.keys() - OPERATORS.keys() == elsewhere


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def _product(gpu: Gpu) -> Any:
    args = (meta(4, 8), meta(8, 4))
    return [
        step
        for step in script_of(aten.mm.default, args, {}, meta(4, 4), gpu)
        if isinstance(step, Keep | Take)
    ]


@pytest.mark.parametrize("measured_bytes", [None, 20 * MIB])
@pytest.mark.parametrize("release", ["2.11.0", "2.13.0", "2.15.0"])
def test_a_workspace_is_kept_or_taken_and_never_both(
    release: str, measured_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an H100 two threads keep 32 MiB each, or what was measured; since 2.15 a call takes and frees it."""
    monkeypatch.setattr(torch, "__version__", release)
    hardware = find_hardware("h100")
    calibration = hardware.calibration.model_copy(update={"cublas_workspace_bytes": measured_bytes})
    rules = CudaRules(tiny(), hardware.__class__(hardware.datasheet, calibration))
    (step,) = _product(rules.gpu)
    if rules.gpu.torch.keeps_cublas_workspaces:
        assert step == Keep("cublas", (measured_bytes or 64 * MIB) // 2)
    else:
        assert step == Take(32 * MIB, workspace=True)


@pytest.mark.parametrize(("value", "native_jit"), [("1", False), ("0", True), (None, True)])
def test_pytorchs_switch_for_what_it_compiles_is_read(
    monkeypatch: pytest.MonkeyPatch, value: str | None, native_jit: bool
) -> None:
    monkeypatch.delenv(NATIVE_JIT_DISABLED, raising=False)
    if value is not None:
        monkeypatch.setenv(NATIVE_JIT_DISABLED, value)
    gpu = CudaRules(tiny(), find_hardware("h100")).gpu
    assert gpu.native_jit == native_jit
    assert gpu.multiplies_outer_products_in_triton == (native_jit and gpu.torch >= (2, 13))


def test_a_release_is_read_from_its_version() -> None:
    assert TorchRelease.of("2.11.0+cu130") == (2, 11)
    assert TorchRelease.of("2.9.1") < TorchRelease(2, 11)
    kept = [TorchRelease(2, minor).keeps_cublas_workspaces for minor in range(11, 16)]
    assert kept == [True, True, True, True, False]


def test_a_rank_copies_its_own_part_of_what_is_gathered() -> None:
    import torch.distributed.fsdp  # declares the operator

    part, whole = torch.empty(1000, device="meta"), torch.empty(8000, device="meta")
    given = [part], whole, [1000], 1000, 3
    returned = whole[3000:4000], whole
    copy_in = torch.ops.fsdp.all_gather_copy_in.default
    assert operator_bytes(copy_in, given, {}, returned, ()) == 2 * part.nbytes


@pytest.mark.parametrize(
    ("before", "after", "per_s"),
    [(torch.bfloat16, torch.float32, 278e9), (torch.bfloat16, torch.bfloat16, 500e9)],
)
def test_gradients_go_into_one_tensor_as_fast_as_the_kernel_s_author_saw(before, after, per_s) -> None:
    """Elements a second on an H100: github.com/pytorch/pytorch/pull/120678. A plain copy would be faster."""
    import torch.distributed.fsdp  # declares the operator

    gradient = torch.empty(8192, 28672, dtype=before, device="meta")
    out = torch.empty(64, gradient.numel() // 64, dtype=after, device="meta")
    device, given = find_hardware("h100"), ([gradient], 0, 64)
    cost = operator_cost(device, torch.ops.fsdp.chunk_cat.default, given, {"out": out}, None)
    assert gradient.numel() / cost.seconds == pytest.approx(per_s, rel=0.01)
    assert cost.held_s == cost.missed_s > 1.4 * memory(device, "copy", gradient.nbytes + out.nbytes)


def test_a_collective_is_no_kernel_beside_its_time_on_the_links() -> None:
    tensor = torch.empty(1000, device="meta")
    summed = torch.ops._c10d_functional.all_reduce.default
    assert operator_cost(find_hardware("h100"), summed, (tensor, "sum", "0"), {}, tensor) is NOTHING
