"""A step's kernels as a GPU took them beside their estimates, by small traces made by hand."""

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.time import on_hardware
from benchmarks.time.on_hardware import (
    COLUMNS,
    Operator,
    kind_of,
    main,
    partners,
    read_operators,
    rows,
    summary,
)


def operator(name: str, us: float, sizes: str = "[[8]]", kernel: str = "vectorized_elementwise") -> Operator:
    return Operator(name, sizes, "[]", "[]", us, kind_of(kernel))


def launch(
    number: int, name: str, kernels: dict[str, float], ts: float, size: int = 8
) -> list[dict[str, Any]]:
    """The events of one operator and of its kernels, with their microseconds."""
    given = {"External id": number, "Input Dims": [[size]], "Input type": ["float"], "Input Strides": [[1]]}
    called = {"cat": "cpu_op", "name": name, "ts": ts, "args": given}
    ran = [
        {"cat": "kernel", "name": kernel, "ts": ts + 5, "dur": us, "args": {"External id": number}}
        for kernel, us in kernels.items()
    ]
    return [*ran, called]


def write_trace(folder: Path, recipe: str, *launches: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    # what else stands in such a file: events without arguments, operators that launch nothing
    others = [
        {"ph": "M", "name": "process_name"},
        {"cat": "cpu_op", "name": "view", "args": {"External id": 99}},
    ]
    path = folder / f"{recipe}.json.gz"
    events = [*others, *(event for each in launches for event in each)]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_an_operators_kernels_count_together_in_the_order_of_launches(tmp_path):
    later = launch(1, "aten::mm", {"nvjet_tst": 20.0, "splitKreduce": 4.0}, ts=50)
    first = launch(2, "aten::copy_", {"Memcpy DtoD": 3.0}, ts=10)
    found = read_operators(write_trace(tmp_path, "a", later, first))
    assert [(each.name, each.us, each.kind) for each in found] == [
        ("aten::copy_", 3.0, "elementwise, side by side"),
        ("aten::mm", 24.0, "product"),
    ]
    assert found[1].shapes == ("aten::mm", "[[8]]", '["float"]', "[[1]]")


def test_partners_have_the_same_shapes_and_each_is_taken_once():
    measured = [
        operator("add", 1.0),
        operator("add", 2.0),
        operator("add", 3.0),
        operator("add", 4.0, "[[9]]"),
    ]
    estimated = [operator("add", 40.0, "[[9]]"), operator("add", 10.0), operator("add", 20.0)]
    # the third of shape 8 has none
    assert [(each.us, us) for each, us in partners(measured, estimated)] == [
        (1.0, 10.0),
        (2.0, 20.0),
        (4.0, 40.0),
    ]


def test_totals_are_of_all_and_errors_of_long_operators():
    pairs = [(operator("mm", 100.0), 110.0), (operator("mm", 10.0), 7.0), (operator("mm", 9.9), 99.0)]
    found = summary(pairs)
    assert (found["operators"], found["measured_ms"], found["estimated_ms"]) == (3, 0.12, 0.22)
    # 10 % and 30 %
    assert (found["long_operators"], found["median_error"]) == (2, 0.2)
    assert summary([(operator("mm", 1.0), 2.0)])["median_error"] is None


def test_operators_alike_are_one_row():
    pairs = [(operator("add", us), us + 1) for us in (1.0, 2.0, 6.0)] + [(operator("mul", 5.0), 5.5)]
    assert list(rows("a", pairs)) == [
        ("a", "add", "[[8]]", "[]", "[]", "elementwise, side by side", 3, 2.0, 3.0),
        ("a", "mul", "[[8]]", "[]", "[]", "elementwise, side by side", 1, 5.0, 5.5),
    ]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void at::native::multi_tensor_apply_kernel<FusedAdam>", "optimizer"),
        ("void kDequantizeBlockwise<bf16>", "dequantize"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("sm90_xmma_gemm_bf16", "product"),
        ("void at::native::reduce_kernel<512>", "reduction"),
        ("something new", "other"),
    ],
)
def test_kinds_by_the_names_of_kernels(kernel, kind):
    assert operator("x", 1.0, kernel=kernel).kind == kind


def test_the_command_writes_both_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(on_hardware, "profiles_folder", lambda: tmp_path)
    (tmp_path / "h100").mkdir()
    mm = {"nvjet_tst": 20.0}
    write_trace(
        tmp_path / "measured", "a", launch(1, "mm", mm, 1), launch(2, "add", {"reduce_kernel": 10.0}, 2)
    )
    write_trace(tmp_path / "estimated", "a", launch(7, "mm", {"gemm": 25.0}, 1))
    assert main([str(tmp_path / "measured"), str(tmp_path / "estimated")]) == 0
    document = json.loads((tmp_path / "h100" / "kernels.json").read_bytes())
    assert document["all"] == document["recipes"]["a"] == document["kinds"]["product"]
    assert document["all"]["median_error"] == 0.25
    assert json.loads(capsys.readouterr().out) == document["all"]
    table = gzip.decompress((tmp_path / "h100" / "kernels.csv.gz").read_bytes()).decode()
    (line,) = csv.DictReader(io.StringIO(table))
    assert set(line) == set(COLUMNS)
    assert (line["recipe"], line["count"], line["measured_us"], line["estimated_us"]) == (
        "a",
        "1",
        "20.0",
        "25.0",
    )

    write_trace(tmp_path / "anew", "a", launch(7, "mm", {"gemm": 22.0}, 1))
    assert main([str(tmp_path / "h100" / "kernels.csv.gz"), str(tmp_path / "anew")]) == 0
    document = json.loads((tmp_path / "h100" / "kernels.json").read_bytes())
    assert document["kinds"]["product"] == document["all"]
    assert (document["all"]["measured_ms"], document["all"]["median_error"]) == (0.02, 0.1)
