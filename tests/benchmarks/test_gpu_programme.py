"""The hardware programme on the CPU, with small models: what will meet a GPU has run before it does."""

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu_programme.__main__ import PARTS, chosen_pieces, main
from benchmarks.gpu_programme.calibrate import _beyond_torch, calibration_of
from benchmarks.gpu_programme.import_results import NAME, files_of, read_results
from benchmarks.gpu_programme.kernels import median_seconds
from benchmarks.gpu_programme.recipes import CASES, TRACES, VALIDATE, Spec, with_layers
from benchmarks.gpu_programme.tasks import Context
from benchmarks.gpu_programme.trace_file import decode_trace
from benchmarks.speed import overhead
from harness.errors import InputError
from harness.hardware.hardware import Calibration
from harness.recipe.recipe import Recipe
from harness.step_profile.step_profile import StepProfile
from pages.profiles.__main__ import readme

FORK = "spawn" if sys.platform == "darwin" else "fork"
FEW = (
    *("1b-bf16", "1b-fused-linear", "tinyllama-lora", "base", "flash-attention-2", "host-link"),
    *("host-optimizer", "launch", "cublas", "1b-bf16.recording-*"),
    *("1b-bf16-mixed.harness.1", "1b-bf16-mixed.trainer.1", "activations.*", "llama-3.2-1b-bf16"),
    "llama-3.2-1b-bf16.process-1",
)
"""At least one piece of every part, and of every reason to skip one."""


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context("cpu", True, tmp_path)


@pytest.fixture(scope="module")
def programme(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The whole programme, with a few pieces of each part: the folder, what was printed is not kept."""
    out = tmp_path_factory.mktemp("programme")
    only = [word for name in FEW for word in ("--only", name)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overhead, "WARMUP_ROUNDS", 1)
        assert main(["--tiny", "--all", "--out", str(out), *only]) == 0
    return {"out": out, **{part: json.loads((out / f"{part}.json").read_bytes()) for part in PARTS}}


def results(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {result["name"]: result for result in document["results"]}


def test_every_part_has_a_file_and_all_of_them_are_few_and_small(programme):
    files = sorted(programme["out"].glob("*.json"))
    assert [path.stem for path in files] == sorted(PARTS)
    assert sum(path.stat().st_size for path in files) < 2**20
    for part in PARTS:
        assert programme[part]["device"]["kind"] == "cpu"
        assert torch.__version__.startswith(programme[part]["provenance"]["versions"]["torch"])
        statuses = {result["status"] for result in programme[part]["results"]}
        assert "ok" in statuses
        assert statuses <= {"ok", "skipped"}, programme[part]["results"]


def test_what_cannot_run_here_says_why(programme):
    assert "NVIDIA GPU: Liger's loss" in results(programme["traces"])["1b-fused-linear"]["reason"]
    assert "no kernel for a CPU" in results(programme["cases"])["flash-attention-2"]["reason"]
    assert "CUDA libraries'" in results(programme["calibrate"])["cublas"]["reason"]


def test_measured_profiles_are_whole(programme):
    profile = StepProfile.model_validate(
        results(programme["validate"])["tinyllama-lora"]["result"]["profile"]
    )
    assert (profile.source, profile.complete) == ("measured", True)
    assert profile.memory.at_peak.total_bytes() == profile.memory.peak_allocated_bytes
    assert profile.recipe["lora_targets"] == ["q_proj", "v_proj"]
    assert 0 < len(profile.top) <= 20
    case = StepProfile.model_validate(results(programme["cases"])["base"]["result"]["profile"])
    assert case.step.time_s.median is not None


def test_the_simulated_profile_has_the_measured_ones_optimizer_state(programme):
    """LoRA of rank 8 on q (128 -> 128) and v (128 -> 64) in 4 layers, two fp32 moments each: 16 tensors.
    Each has a step counter too, 4 bytes, which on a GPU stays on the host.
    """
    predicted = results(programme["predict"])["tinyllama-lora"]["result"]["profiles"]["simulated"]
    measured = results(programme["validate"])["tinyllama-lora"]["result"]["profile"]
    assert predicted["recipe"] == measured["recipe"]
    state = [p["memory"]["at_peak"]["optimizer_state_bytes"] for p in (predicted, measured)]
    moments = 4 * 8 * (128 + 128 + 128 + 64) * 2 * 4
    assert state == [moments, moments + 16 * 4]


def test_harness_and_trainer_train_the_same(programme):
    """Not the arithmetic of a ratio, but that it compares the same work: the losses agree."""
    ours = results(programme["peers"])["1b-bf16-mixed.harness.1"]["result"]
    theirs = results(programme["peers"])["1b-bf16-mixed.trainer.1"]["result"]
    assert ours["mean_loss"] == pytest.approx(theirs["mean_loss"], abs=1e-6)
    assert len(ours["step_s"]) == len(theirs["step_s"]) == 1


def test_running_out_of_memory_is_exit_status_3_with_everything_written(programme):
    measured = results(programme["oom"])["activations.measured"]["result"]
    assert measured["exit_status"] == 3
    assert "out of memory in forward, asking for" in measured["message"]
    assert {"profile.json", "snapshot.pickle", "recipe.yaml"} <= set(measured["files"])
    assert measured["snapshot_entries"] > 0
    predicted = results(programme["oom"])["activations.simulated"]["result"]
    assert predicted["oom"]["phase"] == measured["oom"]["phase"] == "forward"
    # the same tensor did not fit: scores of 8 sequences, 4 heads, 2048 x 2048, fp32
    scores = 8 * 4 * 2048 * 2048 * 4
    assert predicted["oom"]["requested_bytes"] == measured["oom"]["requested_bytes"] == scores


def test_the_profiled_step_leaves_its_trace(programme):
    """Beside the part's file; a CPU has no kernels in it."""
    made = results(programme["profile"])["llama-3.2-1b-bf16"]["result"]
    trace = programme["out"] / "profile" / "llama-3.2-1b-bf16.json.gz"
    assert made["trace_bytes"] == trace.stat().st_size
    assert made["kernels"] == 0
    assert made["step_s"] > 0
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "cpu_op" and "Input Dims" in event["args"] for event in events)


def test_overhead_compares_recording_off_and_on(programme):
    off, on = (results(programme["overhead"])[f"1b-bf16.recording-{r}"]["result"] for r in ("off", "on"))
    assert (off["bar"], on["bar"]) == (1.01, 1.05)
    assert off["ratio_low"] <= off["ratio"] <= off["ratio_high"]
    assert on["ratio"] > 1  # on a CPU every operator is followed


def test_the_measurements_are_those_of_the_calibration(programme):
    rows = results(programme["calibrate"])
    assert rows["launch"]["result"]["operators"] > 100
    assert calibration_of(programme["calibrate"]["results"], "h200", "here", of_host=True)["host_op_s"] > 0


def test_the_programme_can_be_imported_and_shown(programme, tmp_path):
    documents = read_results(programme["out"])
    imported = files_of(documents, tmp_path, tmp_path / "traces")
    for path, content in imported.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        assert str(Path.cwd()).encode() not in content
    assert (tmp_path / "cpu" / "tiny-tinyllama-lora.measured.json").exists()
    assert not (tmp_path / "traces").exists()
    text = readme(tmp_path)
    assert "tiny-tinyllama-lora" in text
    assert "that takes a GPU" in text
    assert "needs an NVIDIA GPU" in text


def test_traces_hold_the_whole_step(programme):
    import base64

    made = results(programme["traces"])["1b-bf16"]["result"]
    trace = decode_trace(base64.b64decode(made["trace"]))
    assert made["events"] == len(trace.entries) > 1000
    assert made["trace_bytes"] < 40_000
    steps = [(phase["step"], phase["phase"]) for phase in trace.phases]
    assert steps[:2] == [(-1, "setup"), (0, "data")]
    assert steps[-1] == (2, "optimizer_step")
    assert len(trace.losses) == 3
    files = {frame["filename"] for entry in trace.entries for frame in entry["frames"]}
    assert any(file.startswith("transformers/models/llama") for file in files)
    assert not any(file.startswith("/") for file in files)


def test_parts_and_pieces_are_listed(capsys, context):
    assert main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(PARTS)
    assert listed[:4] == ["traces", "validate", "calibrate", "profile"]
    for part in PARTS:
        names = [piece.name for piece in chosen_pieces(part, context, [])]
        assert len(set(names)) == len(names) > 0
        assert all(NAME.fullmatch(name) for name in names)


@pytest.mark.parametrize("spec", [*TRACES, *VALIDATE, *CASES], ids=lambda spec: spec.name)
def test_every_recipe_is_possible_whole_and_tiny(spec, tmp_path):
    whole, tiny = spec.recipe(), spec.recipe(tiny=True)
    assert tiny.model == "tiny-llama-bytes"
    kept = set(Recipe.model_fields) - {
        *("model", "data", "seq_len", "micro_batch_size", "warmup_steps", "steps"),
    }
    assert all(getattr(whole, name) == getattr(tiny, name) for name in kept)
    cut = with_layers(whole, spec.layers, tmp_path)
    if spec.layers is not None:
        assert json.loads(Path(cut.model).read_bytes())["num_hidden_layers"] == spec.layers


def test_traces_cover_every_toggle_that_changes_allocations():
    recipes = [spec.recipe() for spec in TRACES]
    for name, values in {
        "precision": {"fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed"},
        "quantization": {"none", "nf4", "int8"},
        "optimizer_impl": {"foreach", "fused"},
        "optimizer": {"adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"},
        "attention": {"sdpa", "eager", "flex_attention", "flash_attention_2"},
        "loss": {"standard", "fused_linear"},
        "offload": {(), ("activations",), ("optimizer",), ("parameters",)},
        "optimizer_in_backward": {True, False},
        "gradient_checkpointing": {True, False},
        "upcast_for_kbit": {True, False},
        "master_weights": {True, False},
        "packing": {True, False},
    }.items():
        assert {getattr(recipe, name) for recipe in recipes} == values, name
    assert any(recipe.lora_dropout for recipe in recipes)


def test_calibration_by_hand():
    """A link that reaches half of its rate, and a machine around the card that is asked for or not."""

    def row(**fields: Any) -> dict[str, Any]:
        return {"s": 1.0, **fields}

    results = [
        {
            "name": "host-link",
            "status": "ok",
            # PCIe 5.0 x16: 32 GT/s x 16 lanes x 128/130 / 8 = 63.015e9 bytes/s
            "result": {"rows": [row(memory="pinned", bytes=31.5077e9), row(memory="pageable", bytes=1)]},
        },
        {
            "name": "host-optimizer",
            "status": "ok",
            "result": {"rows": [row(dtype="bf16", bytes=80e9), row(dtype="fp32", bytes=1)]},
        },
        {"name": "launch", "status": "ok", "result": {"operator_s": 7e-6, "context_bytes": 600}},
        # of earlier programmes, estimated by shape; and PyTorch's default: kept as measurements alone
        {"name": "matmul", "status": "ok", "result": {"rows": [row(dtype="bf16", flops=1.0)]}},
        {"name": "memory", "status": "ok", "result": {"rows": [row(bytes=1.0)]}},
        {"name": "cublas", "status": "ok", "result": {"workspace_bytes": 64}},
    ]
    of_card = calibration_of(results, "h200", "by hand", of_host=False)
    assert set(of_card) == {"source", "host_link_fraction", "cuda_context_bytes"}
    made = Calibration.model_validate(of_card)
    assert made.host_link_fraction == pytest.approx(0.5, rel=1e-4)
    assert made.cuda_context_bytes == 600
    with_host = calibration_of(results, "h200", "by hand", of_host=True)
    assert with_host == of_card | {"host_op_s": 7e-6, "host_memory_bandwidth": 80e9}
    only_launch = [{**results[2], "result": {"operator_s": 7e-6, "context_bytes": None}}]
    assert calibration_of(only_launch, "h200", "x", of_host=True) == {"source": "x", "host_op_s": 7e-6}
    assert calibration_of(only_launch, "h200", "x", of_host=False) == {"source": "x"}


@pytest.mark.parametrize(
    ("process", "used", "before", "context_bytes"),
    [(700, 900, 300, 600), (None, 900, 300, 500), (None, 900, None, None), (None, None, None, None)],
)
def test_context_bytes_where_the_driver_tells_and_where_not(
    monkeypatch, process, used, before, context_bytes
):
    nvml = SimpleNamespace(process_bytes=lambda: process, used_bytes=lambda: used, unavailable=None)
    monkeypatch.setattr("harness.hardware.nvml.Nvml", lambda uuid: nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="x"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 100)
    found = _beyond_torch(Context("cuda", False, Path()), before)
    assert (found["context_bytes"], found["device_used_bytes"]) == (context_bytes, used)


def test_kernels_are_timed_between_cuda_events(monkeypatch):
    """Each call takes 3 ms of a clock that only the kernel moves; the three calls before are not counted."""
    now_ms = [0.0]
    calls: list[float] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_ms = now_ms[0]

        def elapsed_time(self, later: "Event") -> float:
            return later.at_ms - self.at_ms

    def kernel() -> None:
        calls.append(now_ms[0])
        now_ms[0] += 50 if len(calls) <= 3 else 3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert median_seconds(kernel, Context("cuda", False, Path())) == pytest.approx(3e-3)


def test_specs_change_only_what_they_say():
    assert Spec("x", "llama-3.1-8b-lora", {"seq_len": 7}).recipe().seq_len == 7
    with pytest.raises(InputError, match="no_such_field"):
        Spec("x", "llama-3.1-8b-lora", {"no_such_field": 7}).recipe()
