"""Measuring on the CPU, against the tensors that really exist and against sums written out by hand."""

import gc
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import bitsandbytes  # noqa: F401  (makes tensors when imported: before anything is counted)
import peft.tuners.loha  # noqa: F401  (likewise)
import pytest
import torch
from torch import Tensor

from harness.errors import InputError
from harness.measure import Silent, chosen_device, measure
from harness.measure import measured_run as measuring
from harness.measure.cpu import CpuObserver
from harness.recipe.recipe import Recipe
from harness.run_folder.run_folder import RunFolder
from harness.step_profile.step_profile import StepProfile
from harness.training.model import build_training
from harness.training.step import Training
from tests.support.memory_viz import check_torch_reads
from tests.support.places import LLAMA, ROOT
from tests.support.tiny import CPU, built, tiny

FEW: dict[str, Any] = {"warmup_steps": 2, "steps": 3}
KINDS = ["warmup"] * 2 + ["timed"] * 3 + ["recorded"] * 2


class Watch:
    """Progress that remembers, and calls `then(index, kind)` after every step."""

    def __init__(self, then: Any = lambda index, kind: None) -> None:
        self.seen: list[tuple[int, str]] = []
        self.then = then

    def step(self, index, total, kind, loss, tokens_per_s, peak_bytes) -> None:
        self.seen.append((index, kind))
        assert (tokens_per_s is not None) == (kind == "timed")
        self.then(index, kind)


def measured(recipe: Recipe, folder: Path, then: Any = lambda index, kind: None) -> StepProfile:
    return measure(recipe, RunFolder(folder / "run", "tiny", recipe), Watch(then), CPU)


def storages(tensors) -> dict[int, int]:
    """Bytes by identity of the distinct storages."""
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


RECIPES = {
    "full": tiny(**FEW),
    "lora": tiny(**FEW, adapter="lora", precision="bf16"),
    "accumulation": tiny(**FEW, gradient_accumulation_steps=3, max_grad_norm=1.0),
    "checkpointing": tiny(**FEW, gradient_checkpointing=True, seq_len=64),
    "optimizer in backward": tiny(**FEW, optimizer_in_backward=True),
    "master weights": tiny(**FEW, precision="fp16", master_weights=True),
    "nf4": tiny(**FEW, quantization="nf4", adapter="lora", precision="bf16"),
    "optimizer on the host": tiny(**FEW, offload=("optimizer",)),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_parts_add_up_and_come_back_from_the_file(recipe, tmp_path):
    profile = measured(recipe, tmp_path)
    memory = profile.memory
    assert profile.complete
    assert memory.kind == "live_tensors"
    assert memory.at_peak.total_bytes() == memory.peak_allocated_bytes
    assert memory.peak_allocated_bytes == max(p.peak_allocated_bytes or 0 for p in profile.phases.values())
    assert memory.peak_phase is not None
    assert profile.phases[memory.peak_phase].peak_allocated_bytes == memory.peak_allocated_bytes
    assert memory.at_peak.other_bytes == 0
    assert sum(a.size_bytes for a in profile.top) <= memory.peak_allocated_bytes
    assert (memory.host_bytes is not None) == ("optimizer" in recipe.offload)
    assert StepProfile.read(tmp_path / "run" / "profile.json") == profile


def test_categories_are_the_real_tensors_bytes(tmp_path):
    """With AdamW's foreach step the peak is where gradients, moments and temporaries are all there."""
    recipe = tiny(**FEW, micro_batch_size=1, seq_len=2)
    at_peak = measured(recipe, tmp_path).memory.at_peak

    training, batches = built(recipe)
    model: Any = training.model
    (batch,), num_tokens = next(batches)
    model(**batch, num_items_in_batch=num_tokens).loss.backward()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    optimizer.step()
    state = [t for s in optimizer.state.values() for t in s.values()]
    assert at_peak.parameters_bytes == sum(storages([*model.parameters(), *model.buffers()]).values())
    assert at_peak.gradients_bytes == sum(storages(p.grad for p in weights).values())
    assert at_peak.optimizer_state_bytes == sum(storages(state).values())
    assert at_peak.inputs_bytes == 2 * (2 * 2 * 8)  # input_ids and labels, (1, 2), int64, read and copied
    assert at_peak.activations_bytes == 4  # the loss


def test_tracked_bytes_are_all_the_tensors_there_are(tmp_path):
    """At the end of a recorded step, every tensor that Python can find is accounted for, and no other."""
    recipe = tiny(**FEW, adapter="lora", precision="bf16", max_grad_norm=1.0)
    before = every_storage()
    found: list[int] = []

    def count(index: int, kind: str) -> None:
        if kind != "recorded":  # looking takes seconds, in a process that has run many tests
            return
        now = every_storage()
        found.append(sum(size for identity, size in now.items() if identity not in before))

    profile = measured(recipe, tmp_path, count)
    # Between the last phase and here the batch's copy goes: input_ids and labels, (2, 16), int64. (And the
    # micro batch's loss, while the step's, as large, is made.)
    assert found[-1] == (profile.phases["optimizer_step"].allocated_at_end_bytes or 0) - 2 * (2 * 16) * 8


def every_storage() -> dict[int, int]:
    gc.collect()
    # not isinstance: it would ask every object of every library for its __class__
    return storages(t for t in gc.get_objects() if issubclass(type(t), Tensor))


def test_memory_that_is_given_back_by_resizing_is_seen() -> None:
    """FSDP gives back a gathered weight and takes it again by its storage, which stays."""
    observer = CpuObserver()
    with observer.phase("setup"):
        weight, other = torch.empty(1000), torch.empty(10)
        storage = weight.untyped_storage()
        storage.resize_(0)
        assert observer._recording.allocated_bytes == 40
        storage.resize_(400)
        assert observer._recording.allocated_bytes == 440
        del weight, storage
        assert observer._recording.allocated_bytes == 40
    assert observer.memory().setup_peak_allocated_bytes == 4040
    del other


def test_peaks_of_setup_first_step_and_phases_are_kept_apart():
    """Sizes chosen so that every number below can be read off; float32, so 4 bytes an element."""
    observer = CpuObserver()

    def step(kind, forward, kept):
        observer.begin_step(0, kind)
        with observer.phase("forward"):
            held = torch.empty(forward)
            del held
            kept.append(torch.empty(10))
        observer.end_step()

    kept: list[Tensor] = []
    with observer.phase("setup"):
        big = torch.empty(1000)
        weight = torch.empty(100)
        del big
    observer.trained(_training_of(weight))
    step("warmup", 500, kept)
    step("warmup", 9000, [])  # nobody looks
    step("timed", 9000, [])
    step("recorded", 200, kept)
    step("recorded", 300, kept)
    memory, forward = observer.memory(), observer.phase_memory()["forward"]
    assert memory.setup_peak_allocated_bytes == 4 * 1100
    assert memory.first_step_peak_allocated_bytes == 4 * (100 + 500)
    assert forward.peak_allocated_bytes == 4 * (100 + 10 + 10 + 300)
    assert forward.allocated_at_end_bytes == 4 * (100 + 10 + 10 + 10)
    spans = observer.history().spans
    assert sorted(span.size_bytes for span in spans) == [40, 40, 40, 400, 800, 1200]
    assert {span.category for span in spans if span.size_bytes == 400} == {"parameters"}


def _training_of(weight: Tensor) -> Training:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(weight)
    return type(
        "Training", (), {"model": model, "optimizer": torch.optim.SGD([model.weight]), "scaler": None}
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_setup_peak_of_a_checkpoint_holds_its_parameters(tmp_path, precision):
    """transformers loads in threads; what they make counts as what this thread makes."""
    made = build_training(tiny(), CPU).model
    made.save_pretrained(tmp_path / "checkpoint")
    recipe = tiny(**FEW, model=str(tmp_path / "checkpoint"), weights="pretrained", precision=precision)
    profile = measured(recipe, tmp_path)
    parameter_bytes = sum(p.numel() for p in made.parameters()) * (4 if precision == "fp32" else 2)
    setup_peak = profile.memory.setup_peak_allocated_bytes
    assert setup_peak >= parameter_bytes
    # beyond them buffers, scalars and one weight on its way, of which the embedding is the largest
    assert setup_peak < parameter_bytes + 264 * 64 * 4 + 1024
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ


def test_timed_steps_run_with_nothing_watching(tmp_path, monkeypatch):
    watching: list[int] = []

    def set_up(*arguments):
        training, batches = original(*arguments)
        training.model.register_forward_pre_hook(
            lambda *_: watching.append(torch._C._len_torch_dispatch_stack())
        )
        return training, batches

    original = measuring.set_up
    monkeypatch.setattr(measuring, "set_up", set_up)
    profile = measured(tiny(**FEW), tmp_path)
    followed_then_counted = [1, 0, 0, 0, 0, 1, 1, 1]
    assert watching == followed_then_counted
    for phase in (*profile.phases.values(), profile.step):
        assert phase.time_s.n == 3
        assert phase.time_s.median is not None
        assert phase.time_s.p10 <= phase.time_s.median <= phase.time_s.p90  # type: ignore[operator]
    parts = sum(phase.time_s.median or 0 for phase in profile.phases.values())
    assert 0 < parts < profile.step.time_s.p90 * 1.5  # type: ignore[operator]


def test_the_snapshot_opens_in_memory_viz_and_has_the_same_peak(tmp_path):
    profile = measured(tiny(**FEW), tmp_path)
    snapshot = pickle.loads((tmp_path / "run" / "snapshot.pickle").read_bytes())
    check_torch_reads(snapshot)
    trace = snapshot["device_traces"][0]
    changes = {"alloc": 1, "free_requested": -1}
    deltas = [changes.get(entry["action"], 0) * entry["size"] for entry in trace]
    end = sum(segment["allocated_size"] for segment in snapshot["segments"])
    level = end - sum(deltas)
    levels = [level := level + delta for delta in deltas]
    assert max(levels) == profile.memory.peak_allocated_bytes
    phases = {entry["user_metadata"] for entry in trace if entry["action"] == "alloc"}
    assert phases == {f"phase={name}" for name in ("data", "forward", "backward", "optimizer_step")}


def test_the_log_grows_with_every_step(tmp_path):
    def look(index: int, kind: str) -> None:
        lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
        assert len(lines) == index + 1
        assert json.loads(lines[-1])["step"] == index
        assert not (tmp_path / "run" / "profile.json").exists()

    profile = measured(tiny(**FEW, precision="fp16-mixed"), tmp_path, look)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == KINDS
    assert [line["loss"] for line in lines] == profile.step.loss
    assert all(line["loss_scale"] == 2.0**16 for line in lines)
    assert all(("forward_s" in line) == (line["kind"] == "timed") for line in lines)


def test_a_recipe_without_warmup_has_no_first_step_peak(tmp_path):
    profile = measured(tiny(warmup_steps=0, steps=1), tmp_path)
    assert profile.memory.first_step_peak_allocated_bytes is None
    assert profile.step.model_flops is not None


@pytest.mark.parametrize(
    ("attention", "kernels"), [("eager", []), ("sdpa", ["aten._scaled_dot_product_flash_attention_for_cpu"])]
)
def test_the_attention_that_ran_is_recorded(attention, kernels, tmp_path):
    provenance = measured(tiny(**FEW, attention=attention), tmp_path).provenance
    assert provenance["attention"] == attention
    assert provenance["attention_kernels"] == kernels


def test_an_interrupt_keeps_what_is_known(tmp_path):
    def interrupt(index: int, kind: str) -> None:
        if index == 3:
            os.kill(os.getpid(), signal.SIGINT)

    profile = measured(tiny(**FEW), tmp_path, interrupt)
    assert not profile.complete
    assert profile.oom is None
    assert len(profile.step.loss or []) == 4
    assert profile.step.time_s.n == 2
    assert profile.memory.peak_allocated_bytes is None
    assert profile.memory.first_step_peak_allocated_bytes is not None
    assert StepProfile.read(tmp_path / "run" / "profile.json") == profile


def test_an_interrupt_in_setup_leaves_no_folder(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "set_up", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measured(tiny(), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", ["warmup", "recorded"])
def test_out_of_memory_keeps_what_is_known(failing, tmp_path, monkeypatch):
    """A real allocation that cannot succeed: 2**60 bytes, asked for in forward."""

    def set_up(*arguments):
        training, batches = original(*arguments)
        step = [0]

        def hook(*_):
            step[0] += 1
            if KINDS[step[0] - 1] == failing:
                torch.empty(2**58)

        training.model.lm_head.register_forward_hook(hook)
        return training, batches

    original = measuring.set_up
    monkeypatch.setattr(measuring, "set_up", set_up)
    profile = measured(tiny(**FEW), tmp_path)
    assert not profile.complete
    assert profile.oom is not None
    assert (profile.oom.phase, profile.oom.requested_bytes) == ("forward", 2**60)
    assert profile.oom.top
    assert profile.oom.top[0].size_bytes > 0
    assert profile.memory.at_peak.total_bytes() == profile.memory.peak_allocated_bytes
    assert profile.memory.peak_phase == ("forward" if failing == "warmup" else profile.memory.peak_phase)
    assert StepProfile.read(tmp_path / "run" / "profile.json") == profile


def test_a_signal_while_an_error_is_looked_at_does_not_cost_the_profile(tmp_path, monkeypatch):
    """As a rank meets them: another is gone, and so the agent that started both ends this one."""

    def told_to_end(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return look_back(*arguments, **options)

    def one_step(*arguments):
        yield next(run_steps(*arguments))
        raise RuntimeError("can't allocate memory: you tried to allocate 7 bytes")

    look_back, run_steps = measuring.look_back, measuring.run_steps
    monkeypatch.setattr(measuring, "look_back", told_to_end)
    monkeypatch.setattr(measuring, "run_steps", one_step)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            measured(tiny(**FEW), tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    profile = StepProfile.read(tmp_path / "run" / "profile.json")
    assert profile.oom is not None
    assert profile.oom.requested_bytes == 7
    assert len(profile.step.loss or []) == 1


def test_other_errors_are_not_taken_for_out_of_memory(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("a shape is wrong")

    monkeypatch.setattr(measuring, "set_up", broken)
    with pytest.raises(RuntimeError, match="a shape is wrong"):
        measured(tiny(), tmp_path)


def test_device_names():
    assert chosen_device("cpu") == CPU
    assert chosen_device() == CPU


RUN = """
import os, resource, signal, sys
from harness import cli
from harness.cli.terminal.progress import RunProgress
plain = RunProgress.step
def step(self, index, *rest):
    plain(self, index, *rest)
    if index == 1:
        {trouble}
RunProgress.step = step
sys.argv = ["harness", "run", *sys.argv[1:]]
cli.script()
"""
INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"
# Nothing larger than what is free inside the process already: the next large tensor fails.
NO_MORE_MEMORY = (
    "held = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize(); "
    "resource.setrlimit(resource.RLIMIT_AS, (held + 2**20, held + 2**20))"
)


@pytest.mark.parametrize(
    ("trouble", "status", "said"),
    [
        (INTERRUPT, 130, "interrupted after 2 of 7 steps"),
        pytest.param(
            NO_MORE_MEMORY,
            3,
            "out of memory in forward",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS binds on Linux only"),
        ),
    ],
    ids=["interrupt", "out of memory"],
)
def test_the_command_in_trouble(trouble, status, said, tmp_path):
    # Attention scores of 3 x 4 x 1024 x 1024 floats, 48 MiB: malloc asks the system for each of them.
    fields = ["seq_len=1024", "micro_batch_size=3", "attention=eager"] if status == 3 else []
    model = LLAMA
    (tmp_path / "tiny.yaml").write_text(f"model: {model}\nprecision: fp32\nseq_len: 16\nsteps: 3\n")
    code = RUN.format(trouble=trouble)
    command = [sys.executable, "-c", code, "tiny.yaml", *fields, "--json", "--out", "run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    profile = StepProfile.from_json(done.stdout)
    assert not profile.complete
    assert (profile.oom is not None) == (status == 3)
    assert StepProfile.read(tmp_path / "run" / "profile.json") == profile
    assert "step 2/7" in done.stderr  # plain lines, for stderr is no terminal
    assert "peak" in done.stderr  # and the tables


def test_a_gpu_without_fp8_units_is_refused_before_anything_runs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A100")
    recipe = tiny(precision="bf16", fp8=True)
    said = r"an A100 has compute capability 8.0, .* need 8.9; set fp8: false"
    with pytest.raises(InputError, match=said):
        measure(recipe, RunFolder(tmp_path / "run", "tiny", recipe), Silent(), torch.device("cuda"))
    assert not (tmp_path / "run" / "profile.json").exists()
