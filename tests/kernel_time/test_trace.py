"""Adjusting estimates to a trace. Operators, their shapes, dtypes and ids are as PyTorch's own profiler
writes them, here on the CPU; the kernels of a GPU are added, each slower than estimated by a known factor.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from harness.errors import InputError
from harness.hardware.hardware import Hardware, find_hardware
from harness.kernel_time import PowerLimit, adjust, product, read_trace
from harness.kernel_time.trace import FEWEST, Seen, Trace, _alike, _shape
from tests.support.commands import Call

SLOWER = {"product": 1.25, "memory": 0.8}
L40S = "NVIDIA L40S"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A trace of products and additions in bf16 on the CPU. Small products: without units for bf16 a CPU
    takes nine seconds for one of 3,072 x 1,024 x 1,024."""
    left, bias, right, many = (
        torch.zeros(shape, dtype=torch.bfloat16) for shape in ((384, 128), (128,), (128, 128), (18432, 1024))
    )
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as run:
        for _ in range(6):
            torch.mm(left, right)
            torch.addmm(bias, left, right)
            torch.add(many, many)
    path = tmp_path_factory.mktemp("trace") / "cpu.json"
    run.export_chrome_trace(str(path))
    return json.loads(path.read_text())


def with_kernels(recorded: dict[str, Any], device: Hardware, tmp_path: Path, named: str = L40S) -> Path:
    events = list(recorded["traceEvents"])
    for event in recorded["traceEvents"]:
        name, given = event.get("name"), event.get("args", {})
        if event.get("cat") != "cpu_op" or name not in ("aten::mm", "aten::addmm", "aten::add"):
            continue
        shape = _shape(name, given["Input Dims"], given["Input type"])
        assert shape is not None
        from harness.kernel_time import memory, product

        kind = "memory" if name == "aten::add" else "product"
        seconds = (
            memory(device, "elementwise", shape[0]) if kind == "memory" else product(device, "bf16", *shape)
        )
        args = {"External id": given["External id"], "device": 0, "stream": 7}
        duration = seconds * SLOWER[kind] * 1e6
        events.append({"ph": "X", "cat": "kernel", "name": "k", "dur": duration, "args": args})
    path = tmp_path / "trace.json"
    path.write_text(
        json.dumps({**recorded, "traceEvents": events, "deviceProperties": [{"id": 0, "name": named}]})
    )
    return path


def test_the_scales_are_what_the_trace_shows(recorded: dict[str, Any], tmp_path: Path) -> None:
    device = find_hardware("l40s")
    trace = read_trace(with_kernels(recorded, device, tmp_path))
    assert trace.device == L40S
    adjusted, found = adjust(trace, device)
    assert {each.kind: each.count for each in found} == {"product": 12, "memory": 6}
    assert adjusted.calibration.product_scale == pytest.approx(1.25, rel=1e-3)
    assert adjusted.calibration.memory_scale == pytest.approx(0.8, rel=1e-3)
    assert adjusted.calibration.attention_scale == 1
    for each in found:
        assert each.before == pytest.approx(abs(1 / SLOWER[each.kind] - 1), rel=1e-2)
        assert each.after == pytest.approx(0, abs=1e-3)


def test_the_command_writes_a_calibration(recorded: dict[str, Any], tmp_path: Path, call: Call) -> None:
    path = with_kernels(recorded, find_hardware("l40s"), tmp_path)
    status, out, _ = call("calibrate", "--trace", path, "--out", tmp_path)
    assert status == 0
    assert "product" in out
    assert "1.250" in out
    written = json.loads((tmp_path / "l40s" / "calibration.json").read_text())
    assert written["product_scale"] == pytest.approx(1.25, rel=1e-3)
    compressed = tmp_path / "trace.json.gz"
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    status, out, _ = call("calibrate", "--trace", compressed, "--json")
    assert status == 0
    assert json.loads(out)["calibration"]["source"] == f"a trace of {L40S}"


def test_a_trace_is_of_the_device_that_it_names_and_a_file_is_no_folder(
    recorded: dict[str, Any], tmp_path: Path, call: Call
) -> None:
    path = with_kernels(recorded, find_hardware("l40s"), tmp_path)
    status, _, err = call("calibrate", "--trace", path, "--hardware", "h100")
    assert status == 2
    assert f"was recorded on {L40S}, which is l40s in the table, not h100" in err
    assert call("calibrate", "--trace", path, "--hardware", "L40S")[0] == 0
    status, _, err = call("calibrate", "--trace", path, "--out", path)
    assert status == 2
    assert "cannot make the folder: Not a directory" in err


def test_a_device_that_the_table_lacks_is_asked_for(
    recorded: dict[str, Any], tmp_path: Path, call: Call
) -> None:
    path = with_kernels(recorded, find_hardware("l40s"), tmp_path, named="NVIDIA Something")
    status, _, err = call("calibrate", "--trace", path)
    assert status == 2
    assert "--hardware NAME" in err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("no json", "is no trace"),
        ("{}", "no traceEvents"),
        ('{"traceEvents": []}', "no kernels of a GPU"),
        ('{"traceEvents": [{"cat": "kernel", "dur": 50, "args": {"External id": 1}}]}', "record_shapes"),
    ],
)
def test_what_is_no_trace_is_refused(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(InputError, match=r"trace.json cannot be read: No such file or directory\.$"):
        read_trace(path)
    path.write_text(content)
    with pytest.raises(InputError, match=said):
        read_trace(path)


def test_products_are_held_against_the_clock_that_their_step_left_them() -> None:
    """An H100 that computes a quarter of the time has its boost clock, one that always computes has not."""
    device = find_hardware("h100")
    boost = PowerLimit(device).factor
    seconds = boost * product(device, "bf16", 4096, 4096, 4096)
    seen = (Seen("product", seconds, "aten::mm", "bf16", (4096, 4096, 4096, 1)),) * FEWEST
    for share, scale in ((0.25, 1.0), (0.99, boost)):
        adjusted, _ = adjust(Trace(None, seen, FEWEST * seconds / share), device)
        assert adjusted.calibration.product_scale == pytest.approx(scale, abs=1e-3)


def test_an_elementwise_kernel_that_memory_does_not_limit_is_left_out() -> None:
    alike = {"Input Dims": [[8, 4], [8, 4], []], "Input type": ["float", "float", "Scalar"]}
    strides = {"Input Strides": [[4, 1], [4, 1], []]}
    assert _alike({**alike, **strides})
    assert not _alike({**alike, "Input Strides": [[4, 1], [1, 8], []]})
    assert not _alike({**alike, **strides, "Input type": ["float", "c10::BFloat16", "Scalar"]})
