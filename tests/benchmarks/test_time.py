"""The commands that hold estimates of time against what others measured, on files of their own."""

import json

import pytest

from benchmarks.gpu_programme.recipes import named_config
from benchmarks.time import kernels, runs
from benchmarks.time.fit import fit_memory, fit_memory_kernel, least_squares
from benchmarks.time.fit_devices import fit_blocks
from benchmarks.time.fit_walks import fit_unaligned, fit_walks
from benchmarks.time.kernel_rows import device_of, read_rows
from benchmarks.time.mpt_step import Run, Shape, Step
from benchmarks.time.step_kernels import step_kernels
from harness.errors import InputError
from harness.hardware.hardware import find_hardware
from harness.kernel_time.memory_kernels import Memory
from harness.kernel_time.parameters import document
from harness.recipe.check import check_recipe
from harness.simulate.simulated_run import simulate
from pages.time import pairs

COMPUTE = """\
device,kernel,m,n,k,bytes,median_ms
a100,mlp_up_proj,1024,4096,4096,,0.178
a100,attn_post_proj,1024,4096,4096,,0.2225
a100,mlp_up_proj,8,4096,4096,,0.026
a100,add,1000,,,49152000,0.026
h200,attn_pre_proj,2048,8192,8192,,0.41
mystery,add,1000,,,49152000,0.026
a100,add,1000,,,49152000,
"""
NETWORK = """\
machine,collective,ranks,devices_per_node,bytes,median_ms
h100_dgx,all_reduce,8,8,67108864,0.322
h100_dgx,all_gather,4,4,67108864,0.2
"""
ROW = {
    "id": "r/1",
    "model": "mpt-125m",
    "seq_len": 2048,
    "gpus": 8,
    "gpu": "A100-40GB",
    "batch_per_gpu": 26,
    "gradient_accumulation": 3,
    "precision": "bf16",
    "sharding": "FULL_SHARD",
    "gradient_checkpointing": False,
    "tokens_per_s_per_gpu": 136334.0,
}


def test_errors_of_kernels_by_device_and_kernel(tmp_path, capsys) -> None:
    file = tmp_path / "compute.csv"
    file.write_text(COMPUTE)
    kernels.main([str(file), "--json"])
    found = {(each["device"], each["kernel"]): each for each in json.loads(capsys.readouterr().out)}
    assert all(set(each) == {"device", "kernel", "count", "median", "p90", "max"} for each in found.values())
    assert found["a100", "mlp_up_proj"]["count"] == 1  # eight rows of tokens stand apart
    assert found["a100", "mlp_up_proj, small"]["count"] == 1
    (apart,) = kernels.of_two_layers(read_rows(file))
    assert (apart["device"], apart["count"], apart["median"]) == ("a100", 1, 0.2)  # 0.178 of 0.2225
    assert found["a100", "add"]["count"] == 1  # without a time there is no row
    assert found["a100", "add"]["median"] < 0.2
    assert found["mystery", "add"]["median"] is None
    kernels.main([str(file)])
    assert "not in the hardware table" in capsys.readouterr().out


def test_errors_of_collectives(tmp_path, capsys) -> None:
    file = tmp_path / "network.csv"
    file.write_text(NETWORK)
    kernels.main([str(file), "--json"])
    found = {each["kernel"]: each for each in json.loads(capsys.readouterr().out)}
    assert found["all_reduce"]["median"] < 0.2
    assert found["all_gather"]["count"] == 1  # which nobody measured there


def test_a_file_of_another_form_is_refused(tmp_path) -> None:
    file = tmp_path / "other.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="median_ms"):
        read_rows(file)


@pytest.mark.parametrize(
    ("name", "device"), [("a100", "a100-80gb"), ("NVIDIA-L40S", "l40s"), ("rtx-4090", "rtx-4090")]
)
def test_devices_by_the_names_of_files(name, device) -> None:
    found = device_of(name)
    assert found is not None
    assert found.name == device


def test_the_libraries_are_those_of_the_file() -> None:
    assert [device_of(name).calibration.cuda for name in ("h100", "h100-cuda13")] == [12, 13]


def test_kernels_of_a_real_step_take_what_is_estimated() -> None:
    """Eight kinds of a step on an H100 at its power limit, to which nothing is fitted; and FSDP2's gradients,
    which another H100 brought into one tensor."""
    kinds = ("forward", "gradients", "FSDP2: gradients")
    rows = [row for row in step_kernels() if row["what"].startswith(kinds)]
    assert len(rows) == 9
    assert all(abs(row["error"]) < 0.05 for row in rows)


def test_runs_and_their_errors(tmp_path, capsys) -> None:
    file = tmp_path / "runs.json"
    rows = [ROW, {**ROW, "id": "r/2", "model": "unheard-of"}, {**ROW, "id": "r/3", "gpu": "TPU"}]
    rows += [{**ROW, "id": "r/4", "batch_per_gpu": None}, {**ROW, "id": "r/5", "tokens_per_s_per_gpu": None}]
    file.write_text(json.dumps({"rows": rows, "shapes": {"mpt-125m": [768, 12, 12]}}))
    runs.main([str(file), "--json"])
    document = json.loads(capsys.readouterr().out)
    first, *others = document["rows"]
    assert abs(first["error"]) < 0.2
    assert first["from"] < first["estimated"] < first["to"]
    assert [row["error"] for row in others] == [None, None, None]
    runs.main([str(file), "--every", "2"])
    assert "r/2" not in capsys.readouterr().out


def test_a_step_is_no_faster_than_its_flops_and_slower_with_checkpointing() -> None:
    device, shape = find_hardware("h100"), Shape(2048, 16, 24)
    run = Run(shape, 2048, 8, 8, 2, checkpointing=False)
    tokens = 2 * 8 * 2048
    # six FLOPs a weight and token: of 24 blocks of 12 x 2048^2, and of the head
    flops = 6 * tokens * (24 * 12 * 2048**2 + 50368 * 2048)
    plain = Step(run, device).estimate()
    again = Step(run.__class__(**{**run.__dict__, "checkpointing": True}), device).estimate()
    assert plain.seconds > flops / 989.5e12
    assert plain.low_s < plain.seconds < plain.high_s
    assert 1.1 < again.seconds / plain.seconds < 1.4
    far = Step(run.__class__(**{**run.__dict__, "gpus": 512}), device).estimate()
    assert far.waits_s > plain.waits_s


def test_the_step_by_shape_is_the_simulated_one(tmp_path) -> None:
    """GPT-2 small with MPT's 50,368 words differs from MPT 125M in its biases: the products take as long."""
    device = find_hardware("a100-80gb")
    model = tmp_path / "gpt2.json"
    model.write_text(json.dumps(named_config("gpt2-small") | {"vocab_size": 50368}))
    fields = {"model": str(model), "precision": "bf16", "seq_len": 1024, "micro_batch_size": 8}
    profile = simulate(check_recipe({**fields, "attention": "sdpa"}, "here"), device)[0]
    simulated: dict[str, float] = {}
    for phase in profile.phases.values():
        for kernel, seconds in phase.kernels_s.items():
            simulated[kernel] = simulated.get(kernel, 0.0) + seconds
    step = Step(Run(Shape(768, 12, 12), 1024, 1, 8, 1, checkpointing=False, attention="flash2"), device)
    estimate = step.estimate()
    assert simulated["product"] == pytest.approx(estimate.by_kind["product"], rel=0.05)
    assert simulated["attention"] == pytest.approx(estimate.by_kind["attention"], rel=0.15)


def test_the_parameters_are_what_the_fit_makes_of_the_files_of_the_repository() -> None:
    """Of kernels that wait for memory: those of aiconfigurator.csv and of chunk_cat.csv, and the H100's."""
    known = document()
    assert fit_blocks() | fit_walks() == known["blocks"]
    assert fit_unaligned() == known["unaligned"]
    again = fit_memory([], None)
    assert {*again} == {"8.9", "9.0-cuda13", "10.0", "12.0"}
    for architecture, kinds in again.items():
        assert kinds["elementwise"] == known["memory"][architecture]["elementwise"]


def test_least_squares_has_no_negative_factor() -> None:
    import numpy as np

    x = np.linspace(1, 10, 50)
    assert least_squares([np.ones_like(x), x], 3 + 2 * x) == pytest.approx([3, 2])
    factors = least_squares([np.ones_like(x), x], 2 * x - 1)
    assert (factors >= 0).all()


def test_the_parameters_of_a_kernel_come_back() -> None:
    import numpy as np

    moved = np.logspace(4, 9, 200)
    device = Memory(bytes_per_s=2e12, l2_bytes=40e6, fp32_flops_per_s=20e12)
    for evicted in (0.0, 2.0):
        held = np.minimum(moved, np.maximum(0, 20e6 - evicted * (moved - 20e6)))
        seconds = 3e-6 + held / 3e12 + (moved - held) / 1.6e12
        known = {"launch_us": 3, "l2_share": 0.5, "l2_evicted": evicted}
        found = fit_memory_kernel(device, moved, seconds)
        assert found == pytest.approx(known | {"l2_bytes_per_flop": 0.15, "rate": 0.8}, rel=0.02)


def test_a_pair_of_published_rows_differs_in_what_is_trained_alone() -> None:
    """QLoRA stands beside the LoRA of the same card, model, sharding and length, the nearest in its rows."""
    ids = {
        "fsdp_qlora/X/M/LoRA ddp/b4/s512": 10.0,
        "fsdp_qlora/X/M/LoRA ddp/b16/s512": 11.0,
        "fsdp_qlora/X/M/LoRA FSDP1/b8/s512": 12.0,
        "fsdp_qlora/Y/M/LoRA ddp/b8/s512": 13.0,
        "fsdp_qlora/X/M/LoRA ddp/b8/s1024": 14.0,
        "fsdp_qlora/X/M/QLoRA ddp/b8/s512": 15.0,
        "fsdp_qlora/X/N/QLoRA ddp/b8/s512": 16.0,
    }
    rows = [{"id": name, "gpu": "x", "measured": value, "estimated": value} for name, value in ids.items()]
    found = [(first["measured"], second["measured"]) for first, second in pairs(rows)]
    assert found == [(10.0, 15.0)]
