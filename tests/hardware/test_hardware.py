"""The hardware table against the physics of the chips: bus widths, core counts and clocks; and the roofline's
floors."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import harness.hardware.hardware as hardware
from harness.errors import InputError
from harness.hardware.hardware import (
    Calibration,
    all_hardware,
    find_hardware,
    hardware_names,
    parse_bytes,
    read_prices,
)
from harness.hardware.roofline import Work, arithmetic_intensity, machine_balance
from harness.hardware.table import DATASHEETS, TABLE_NAMES
from harness.kernel_time import time_of, transfer
from harness.napkin import prediction as napkin
from harness.recipe.recipe import Recipe
from harness.system import TorchRelease
from tests.support.releases import keeps_workspaces

# Memory interface: bits x Gb/s a pin, from TechPowerUp's GPU database.
GDDR_BUS = {
    "l40s": (384, 18.0),
    "l4": (192, 12.5),
    "a10g": (384, 12.5),
    "t4": (256, 10.0),
    "rtx-3090": (384, 19.5),
    "rtx-4090": (384, 21.0),
    "rtx-5090": (512, 28.0),
    "rtx-a6000": (384, 16.0),
    "rtx-6000-ada": (384, 20.0),
    "rtx-3080": (320, 19.0),
    "rtx-3070": (256, 14.0),
    "rtx-3060": (192, 15.0),
    "rtx-4060-ti-16gb": (128, 18.0),
    "rtx-4070-ti-super": (256, 21.0),
    "rtx-4080": (256, 22.4),
    "rtx-5060-ti-16gb": (128, 28.0),
    "rtx-5070-ti": (256, 28.0),
    "rtx-5080": (256, 30.0),
    "rtx-pro-6000": (512, 28.0),
}
# FP32 cores and boost clock in GHz; every core does one multiply-add (2 FLOPs) a cycle.
FP32_CORES = {
    "h100": (16896, 1.98),
    "h200": (16896, 1.98),
    "a100-80gb": (6912, 1.41),
    "a100-40gb": (6912, 1.41),
    "l40s": (18176, 2.52),
    "l4": (7424, 2.04),
    "a10g": (10240, 1.71),
    "t4": (2560, 1.59),
    "v100-16gb": (5120, 1.53),
    "v100-32gb": (5120, 1.53),
    "rtx-3090": (10496, 1.695),
    "rtx-4090": (16384, 2.52),
    "rtx-5090": (21760, 2.407),
    "rtx-a6000": (10752, 1.80),
    "rtx-6000-ada": (18176, 2.505),
    "rtx-3080": (8704, 1.71),
    "rtx-3070": (5888, 1.725),
    "rtx-3060": (3584, 1.777),
    "rtx-4060-ti-16gb": (4352, 2.535),
    "rtx-4070-ti-super": (8448, 2.61),
    "rtx-4080": (9728, 2.505),
    "rtx-5060-ti-16gb": (4608, 2.572),
    "rtx-5070-ti": (8960, 2.452),
    "rtx-5080": (10752, 2.617),
    "rtx-pro-6000": (24064, 2.617),
}
# Dense FLOPs a cycle and tensor core in 16 bit with fp32 accumulation, and tensor cores
# (architecture whitepapers: Volta and Turing 128, GA100 512, GA102 and Ada 128, Hopper 1024).
TENSOR_CORES = {
    "h100": (528, 1024, 1.83),
    "a100-80gb": (432, 512, 1.41),
    "v100-16gb": (640, 128, 1.53),
    "t4": (320, 128, 1.59),
    "rtx-3090": (328, 128, 1.695),
    "rtx-4090": (512, 128, 2.52),
    "rtx-5090": (680, 128, 2.407),
    "rtx-3080": (272, 128, 1.71),
    "rtx-3070": (184, 128, 1.725),
    "rtx-3060": (112, 128, 1.777),
    "rtx-4060-ti-16gb": (136, 128, 2.535),
    "rtx-4070-ti-super": (264, 128, 2.61),
    "rtx-4080": (304, 128, 2.505),
    "rtx-5060-ti-16gb": (144, 128, 2.572),
    "rtx-5070-ti": (280, 128, 2.452),
    "rtx-5080": (336, 128, 2.617),
    "rtx-pro-6000": (752, 256, 2.617),  # GB202 without GeForce's halved accumulation in fp32
}
# What NVIDIA prints on the box: the fastest kind of product with sparsity, and how many times that is a dense
# one in 16 bit that is accumulated in fp32 (twice for each halving of the width, for sparsity, and for what
# GeForce halves).
AI_TOPS = {
    "rtx-4060-ti-16gb": (353, 8),
    "rtx-4070-ti-super": (706, 8),
    "rtx-4080": (780, 8),
    "rtx-4090": (1321, 8),
    "rtx-5060-ti-16gb": (759, 16),
    "rtx-5070-ti": (1406, 16),
    "rtx-5080": (1801, 16),
    "rtx-5090": (3352, 16),
    "rtx-pro-6000": (4000, 8),
}


def test_the_table_holds_every_device_promised():
    promised = "h200 h100 h100-pcie h100-nvl a100-40gb a100-80gb l40s l4 a10g t4 v100-16gb rtx-3090 rtx-4090"
    assert set(hardware_names()) >= {*promised.split(), "rtx-5090", "rtx-a6000", "rtx-6000-ada", "b200"}
    consumer = "rtx-3080 rtx-4060-ti-16gb rtx-4070-ti-super rtx-4080 rtx-5060-ti-16gb rtx-5070-ti rtx-5080"
    assert set(hardware_names()) >= {*consumer.split(), "rtx-3060", "rtx-3070", "rtx-pro-6000"}
    assert len(set(hardware_names())) == len(DATASHEETS)
    assert set(hardware_names()) == set(TABLE_NAMES.values())


def test_the_table_s_device_of_a_measured_profile_is_found_without_torch():
    driver = next(name for name, listed in TABLE_NAMES.items() if listed == "h200")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from harness.hardware import find_hardware, table_device\n"
        "from harness.napkin import predict\n"
        "from harness.recipe import load_recipe\n"
        "profile = predict(load_recipe('smoke')[1], find_hardware('h200'))\n"
        f"profile.hardware.kind, profile.hardware.name = 'cuda', {driver!r}\n"
        "print(table_device(profile).name)\n"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "h200\n"


def test_a_narrow_link_is_narrow():
    """The RTX 4060 Ti and 5060 Ti have eight lanes."""
    assert find_hardware("rtx-4060-ti-16gb").datasheet.host_link.value == pytest.approx(15.75e9, rel=0.001)
    assert find_hardware("rtx-5060-ti-16gb").datasheet.host_link.value == pytest.approx(31.5e9, rel=0.001)


@pytest.mark.parametrize(
    ("name", "memory"), [("mi300x", "192GB"), ("MI250X", "64GB"), ("rx-7900-xtx", "24GB")]
)
def test_amd_is_told_what_holds_and_what_is_not_modelled(name, memory):
    with pytest.raises(InputError, match="not modelled") as refused:
        find_hardware(name)
    assert f"--memory {memory}" in str(refused.value)
    assert parse_bytes(memory) > 0


@pytest.mark.parametrize("name", sorted(GDDR_BUS))
def test_bandwidth_is_what_the_memory_bus_carries(name):
    bits, gigabits = GDDR_BUS[name]
    assert find_hardware(name).memory_bandwidth == pytest.approx(bits * gigabits * 1e9 / 8, rel=0.005)


@pytest.mark.parametrize("name", sorted(FP32_CORES))
def test_fp32_is_two_flops_a_core_and_cycle(name):
    cores, clock = FP32_CORES[name]
    assert find_hardware(name).peak_flops("fp32") == pytest.approx(cores * clock * 1e9 * 2, rel=0.02)


@pytest.mark.parametrize("name", sorted(TENSOR_CORES))
def test_half_precision_is_dense_and_what_the_tensor_cores_do(name):
    cores, flops, clock = TENSOR_CORES[name]
    assert find_hardware(name).peak_flops("fp16") == pytest.approx(cores * flops * clock * 1e9, rel=0.02)


@pytest.mark.parametrize("name", sorted(AI_TOPS))
def test_half_precision_is_what_the_box_says(name):
    tops, times = AI_TOPS[name]
    assert find_hardware(name).peak_flops("bf16") == pytest.approx(tops * 1e12 / times, rel=0.01)


TF32 = {
    "a100-80gb": 156,
    "a40": 74.8,
    "l40s": 183,
    "h100": 494.7,
    "h100-pcie": 378,
    "rtx-3090": 35.6,
    "rtx-4090": 82.6,
}
"""Dense TFLOP/s in TF32, by NVIDIA's data sheets and its whitepapers on Ampere's and Ada's RTX cards."""


@pytest.mark.parametrize("name", sorted(TF32))
def test_tf32_is_half_of_bf16(name):
    assert find_hardware(name).peak_flops("tf32") == pytest.approx(TF32[name] * 1e12, rel=0.02)


def test_older_tensor_cores_have_no_tf32():
    assert not find_hardware("v100-16gb").supports("tf32")


@pytest.mark.parametrize("sheet", DATASHEETS, ids=lambda sheet: sheet.name)
def test_every_number_is_plausible_and_says_where_it_is_from(sheet):
    named_gb = int(sheet.title.split()[-2])
    assert 0.97 * named_gb * 1e9 <= sheet.memory_bytes.value <= named_gb * 2**30
    assert 250e9 <= sheet.memory_bandwidth.value <= 8.1e12
    half, full = sheet.flops["fp16"].value, sheet.flops["fp32"].value
    assert 8e12 <= full <= 130e12
    assert 25e12 <= half <= 2500e12
    assert 1.9 <= half / full <= 31.25  # 2,500 and 80 of a GB200
    assert 70 <= half / sheet.memory_bandwidth.value <= 470, "FLOPs per byte: the machine's balance"
    assert 15e9 <= sheet.host_link.value <= sheet.gpu_link.value <= sheet.memory_bandwidth.value
    assert ("bf16" in sheet.flops) == (float(sheet.compute_capability) >= 8)
    cited = [
        sheet.memory_bytes,
        sheet.memory_bandwidth,
        sheet.host_link,
        sheet.gpu_link,
        *sheet.flops.values(),
    ]
    assert all(len(number.source) > 10 for number in cited)


def test_cublas_workspaces_are_two_of_pytorch_defaults(monkeypatch):
    # DESIGN's unexplained constant on an A100 was about 17 MB: 2 x 8.125 MiB
    monkeypatch.setattr(TorchRelease, "of", lambda _: TorchRelease(2, 14))
    assert find_hardware("a100-80gb").cublas_workspace_bytes == 17_039_360
    assert find_hardware("h100").cublas_workspace_bytes == 64 * 2**20


def test_an_unknown_device_names_the_nearest():
    with pytest.raises(InputError, match="rtx-4090"):
        find_hardware("rtx4090")
    with pytest.raises(InputError, match="t4 has no bf16"):
        find_hardware("T4").peak_flops("bf16")
    # Turing, which flash-attn refuses: "FlashAttention only supports Ampere GPUs or newer"
    flash = Recipe(model="any", precision="fp16", attention="flash_attention_2")
    with pytest.raises(InputError, match=r"t4 has compute capability 7\.5, and the packages of flash"):
        find_hardware("t4").check(flash)
    find_hardware("a10g").check(flash)
    newest = flash.model_copy(update={"attention": "flash_attention_4"})
    with pytest.raises(InputError, match=r"compute capability 8\.6, .* the fourth 9\.0"):
        find_hardware("a10g").check(newest)
    find_hardware("h100").check(newest)
    find_hardware("t4").check(Recipe(model="any", precision="fp16"))
    orthogonal = Recipe(model="any", precision="fp16", optimizer="muon")
    assert find_hardware("v100-16gb").lacks(orthogonal) == "no bf16 units"
    with pytest.raises(InputError, match=r"t4 .*Muon multiplies in bf16, .*set optimizer: adamw"):
        find_hardware("t4").check(orthogonal)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("A100", "Did you mean a100-80gb or a100-40gb?"),
        ("v100", "Did you mean v100-16gb or v100-32gb?"),
        ("4090", "Did you mean rtx-4090?"),
        ("GeForce RTX 3060", "Did you mean rtx-3060?"),
        ("H100 80GB", "Did you mean h100?"),
        ("h1000", "Did you mean h100?"),
        ("NVIDIA A100-SXM4-40GB", "Did you mean a100-40gb?"),
        ("2x3090", "Did you mean rtx-3090? `harness fit` and `shard` take 2 of them by --gpus."),
        ("1080", "in the table. It has"),
        ("rtx-2080-ti", "in the table. It has"),
        ("", "in the table. It has"),
    ],
)
def test_what_is_meant_by_a_name_that_is_short_or_long_and_no_other_card(said, meant):
    with pytest.raises(InputError) as raised:
        find_hardware(said)
    assert meant in str(raised.value)


def test_prices_from_a_file_and_from_pairs(tmp_path):
    file = tmp_path / "prices.yaml"
    file.write_text("h200: 3.5\nl4: 0.7\n")
    assert read_prices(file, ["l4=0.5"]) == {"h200": 3.5, "l4": 0.5}
    assert find_hardware("l4", {"l4": 0.5}).price_per_hour == 0.5
    assert find_hardware("t4", {"l4": 0.5}).price_per_hour is None


@pytest.mark.parametrize("pair", ["h200", "h200=", "h200=free", "h200=-1", "h200=nan", "h200=inf", "cray=3"])
def test_a_price_that_is_none_is_refused(pair):
    with pytest.raises(InputError):
        read_prices(None, [pair])


def test_calibration_is_read_and_a_broken_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "profiles_folder", lambda: tmp_path)
    assert "guess" in find_hardware("l4").calibration.source
    (tmp_path / "l4").mkdir()
    path = tmp_path / "l4" / "calibration.json"
    path.write_text(json.dumps({"source": "measured", "matmul_fraction": 0.7}))
    assert find_hardware("l4").calibration.matmul_fraction == 0.7
    assert len(all_hardware()) == len(DATASHEETS)
    for broken in ("{", '{"matmul_fraction": 1.5}', '{"speed": 1}'):
        path.write_text(broken)
        with pytest.raises(InputError, match=r"calibration\.json"):
            find_hardware("l4")


CHANGES = {
    "matmul_fraction": (0.5, {}),
    "fp32_matmul_fraction": (0.5, {"precision": "fp32"}),
    "attention_fraction": (0.05, {}),
    "memory_fraction": (0.4, {}),
    "product_scale": (1.5, {}),
    "attention_scale": (2.0, {}),
    "memory_scale": (2.0, {}),
    "cuda": (12, {}),
    "sustained_clock": (0.5, {}),
    "host_link_fraction": (0.01, {"offload": ("parameters",)}),
    "host_memory_bandwidth": (20e9, {"offload": ("optimizer",)}),
    "host_op_s": (1e-3, {}),
    "cublas_workspace_bytes": (0, {}),
    "cuda_context_bytes": (0, {}),
}
"""Of every field of a calibration: another value, and a recipe that must feel it."""


@keeps_workspaces
@pytest.mark.parametrize("name", [name for name in Calibration.model_fields if name != "source"])
def test_napkin_reads_every_field_of_a_calibration(name):
    value, fields = CHANGES[name]
    recipe = Recipe(model="llama-3.2-1b", **fields)
    base = find_hardware("h200")
    changed = replace(base, calibration=base.calibration.model_copy(update={name: value}))
    before, after = (napkin.predict(recipe, device) for device in (base, changed))
    assert (before.memory, before.phases) != (after.memory, after.phases)


A100 = find_hardware("a100-80gb")
works = st.builds(
    Work,
    flops=st.integers(0, 10**16),
    bytes_moved=st.integers(0, 10**13),
    operators=st.integers(0, 1000),
    kind=st.sampled_from(["matmul", "attention", "elementwise"]),
    dtype=st.just("fp16"),
)


@given(st.lists(works, min_size=1, max_size=5), st.sampled_from(all_hardware()))
def test_no_work_is_faster_than_the_datasheet(many, device):
    time = time_of(many, device).seconds
    assert time >= sum(work.flops for work in many) / device.peak_flops("fp16") * (1 - 1e-9)
    # of each work 1.25 times the L2 cache at most is not read from the memory
    beyond = sum(max(0, work.bytes_moved - 1.25 * device.l2_bytes * max(1, work.operators)) for work in many)
    assert time >= beyond / device.memory_bandwidth * (1 - 1e-9)


def test_a_large_product_is_compute_bound_a_copy_memory_bound_and_many_small_ones_host_bound():
    # 8192^3 in bf16: 1.1 TFLOP over 0.4 GB. At 312 TFLOP/s at least 3.5 ms; 0.2 ms of memory.
    product = Work(2 * 8192**3, 3 * 8192**2 * 2, 1, "matmul", "bf16")
    assert time_of([product], A100).bound == "compute"
    assert time_of([product], A100).seconds > 3.5e-3
    assert time_of([Work(0, 10**9)], A100).bound == "memory"
    assert time_of([Work(0, 1000, operators=100)], A100).bound == "host"


def test_machine_balance_of_an_a100_is_153_flops_a_byte():
    assert machine_balance(A100, "bf16") == pytest.approx(312e12 / 2.039e12)
    assert arithmetic_intensity([Work(10, 2), Work(0, 3)]) == 2
    assert arithmetic_intensity([Work(10, 0)]) == 0


def test_the_host_link_carries_what_pcie_4_carries():
    # 31.5 GB/s in one direction: 1 GB takes at least 31.7 ms
    assert 31.7e-3 < transfer(A100, 10**9) < 60e-3


def test_a_dtype_the_device_lacks_is_refused():
    with pytest.raises(InputError, match="bf16"):
        time_of([Work(1, 1, dtype="bf16")], find_hardware("v100-16gb"))
