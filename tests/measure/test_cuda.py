"""The CUDA observer over a fake of torch.cuda (fake_cuda.py), where a number must be known or a call counted.

What the real torch.cuda does: tests/gpu, on a GPU and on a virtual one (tests/virtual_gpu/test_emulate.py).
"""

import os
import time
from types import SimpleNamespace

import pynvml
import pytest
import torch
from torch import Tensor, nn

from harness.fit.advice import advise
from harness.hardware import TABLE_NAMES, find_hardware, hardware_names
from harness.measure import cuda as measure_cuda
from harness.measure import measure
from harness.measure import measured_run as measuring
from harness.measure.cuda import CudaObserver
from harness.run_folder.run_folder import RunFolder
from harness.snapshot import read_snapshot, requested_in
from harness.step_profile.in_words import explain_oom
from harness.training.step import Training
from tests.support.fake_cuda import CACHED, FakeCuda, FakeNvml, install
from tests.support.tiny import CPU, tiny

KIB = 1024


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    install(monkeypatch, fake, FakeNvml())
    # Tensors here are on the CPU: give them the addresses that the fake allocator handed out.
    addresses: dict[int, int] = {}
    monkeypatch.setattr(fake, "addresses", addresses, raising=False)

    def storage(tensor: Tensor):
        address = addresses.get(id(tensor))
        if address is None:
            return tensor.untyped_storage()
        nbytes = tensor.untyped_storage().nbytes
        return SimpleNamespace(device=torch.device("cuda"), data_ptr=lambda: address, nbytes=nbytes)

    monkeypatch.setattr(measure_cuda, "storage_of", storage)
    return fake


def observer_of(cuda: FakeCuda, *, with_history: bool = True) -> CudaObserver:
    return CudaObserver(torch.device("cuda"), with_history=with_history)


def step(observer: CudaObserver, cuda: FakeCuda, index: int, kind, *, kept: bool = True) -> None:
    """Inputs of 1 KiB; 4 KiB saved in forward; 2 ms, 3 ms and 1 ms; a scratch tensor in the step."""
    observer.begin_step(index, kind)
    with observer.phase("data"):
        inputs = cuda.alloc(1 * KIB)
    with observer.phase("forward"):
        saved = cuda.alloc(4 * KIB)
        cuda.now_ms += 2
    with observer.phase("backward"):
        scratch = cuda.alloc(8 * KIB)
        cuda.free(scratch)
        cuda.free(saved)
        cuda.now_ms += 3
    with observer.phase("optimizer_step"):
        scratch = cuda.alloc(2 * KIB)
        cuda.free(scratch)
        cuda.now_ms += 1
    cuda.free(inputs)
    observer.end_step()


def run(cuda: FakeCuda, observer: CudaObserver) -> Training:
    """Setup with a weight of 16 KiB (and as much again while it is made), then 1 + 2 + 2 steps."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(1))
    with observer.phase("setup"):
        making = cuda.alloc(16 * KIB)
        cuda.addresses[id(model.weight)] = cuda.alloc(16 * KIB)  # type: ignore[attr-defined]
        cuda.free(making)
    training = Training(model=model, optimizer=torch.optim.SGD(model.parameters()))
    observer.trained(training)
    for index, kind in enumerate(("warmup", "timed", "timed", "recorded", "recorded")):
        step(observer, cuda, index, kind)
    return training


def test_peaks_are_per_phase_and_nothing_is_touched_while_timing(cuda):
    observer = observer_of(cuda)
    run(cuda, observer)
    phases, memory = observer.phase_memory(), observer.memory()
    weight = 16 * KIB
    timed = {"data": 0.0, "forward": 0.002, "backward": 0.003, "optimizer_step": 0.001, "step": 0.006}
    assert [dict(times) for times in observer.times_s] == [{}, *[pytest.approx(timed)] * 2, {}, {}]
    assert {name: stats.peak_allocated_bytes for name, stats in phases.items()} == {
        "data": weight + 1 * KIB,
        "forward": weight + 5 * KIB,
        "backward": weight + 13 * KIB,
        "optimizer_step": weight + 3 * KIB,
    }
    assert phases["forward"].allocated_at_end_bytes == weight + 5 * KIB
    assert phases["backward"].peak_reserved_bytes == weight + 13 * KIB + CACHED
    assert memory.setup_peak_allocated_bytes == 2 * weight
    assert memory.first_step_peak_allocated_bytes == weight + 13 * KIB
    assert memory.peak_reserved_bytes == weight + 13 * KIB + CACHED
    assert memory.fragmentation_bytes == CACHED
    assert memory.host_bytes == 4096 + 4  # pinned, and the one weight of the training, which is a CPU.s here
    assert observer.peak_bytes() == weight + 13 * KIB
    assert observer.peak_reserved_bytes() == weight + 13 * KIB + CACHED
    # setup, then 4 phases in 1 warmup and 2 recorded steps: none in a timed one
    assert cuda.calls.count("reset") == 1 + 4 * 3
    assert [call for call in cuda.calls if call.startswith("history")] == [
        "history all",
        "history None",
        "history all",
    ]


def test_gradients_are_labelled_where_they_were_when_they_were_there(cuda, monkeypatch):
    """The address of a gradient holds something else before and after."""
    model = nn.Linear(1, 1, bias=False)
    observer = observer_of(cuda)
    observer.trained(Training(model=model, optimizer=torch.optim.SGD(model.parameters())))
    monkeypatch.setattr(time, "time_ns", lambda: cuda.now_us * 1000)
    observer.begin_step(0, "recorded")
    with observer.phase("forward"):
        loss = model(torch.ones(1, 1)).sum()
        before = cuda.alloc(512)
        cuda.free(before)
    with observer.phase("backward"):
        cuda._next = before
        gradient = cuda.alloc(512)
        there = SimpleNamespace(device=torch.device("cuda"), data_ptr=lambda: gradient)
        monkeypatch.setattr(measure_cuda, "storage_of", lambda tensor: there)
        loss.backward()
        cuda.free(gradient)
        cuda._next = before
        cuda.free(cuda.alloc(512))
    monkeypatch.setattr(observer, "_what_stays", lambda: [])
    spans = observer.history().spans
    assert [span.category for span in spans] == [None, "gradients", None]
    observer.begin_step(1, "recorded")
    assert not model.weight._post_accumulate_grad_hooks  # type: ignore[attr-defined]


@pytest.mark.parametrize("with_history", [True, False])
def test_shortage(cuda, with_history):
    """With history the request is exact; the message rounds it. The rest is as it was when it happened."""
    observer = observer_of(cuda, with_history=with_history)
    held = cuda.alloc(KIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        cuda.fail(2**31 - 512)
    cuda.free(held)  # what an unfinished expression held is gone when the exception is caught
    report = observer.shortage("forward", caught.value)
    assert report.requested_bytes == (2**31 - 512 if with_history else 2**31)
    assert (report.free_bytes, report.reserved_unallocated_bytes) == (12345, CACHED)


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("Tried to allocate 512 bytes. GPU", 512),
        ("Tried to allocate 1.50 KiB. GPU", 1536),
        ("Tried to allocate 20.00 MiB. GPU", 20 * 2**20),
        ("nothing of the kind", None),
    ],
)
def test_the_request_in_a_message(message, size):
    assert requested_in(message) == size


def test_nvml_numbers(cuda, monkeypatch):
    nvml = FakeNvml()
    install(monkeypatch, cuda, nvml)
    nvml.processes = [
        SimpleNamespace(pid=os.getpid(), usedGpuMemory=100 * 2**20),
        SimpleNamespace(pid=-1, usedGpuMemory=1),
    ]
    observer = observer_of(cuda)
    memory = observer.memory()
    assert memory.process_bytes == 100 * 2**20
    assert memory.cuda_context_bytes == 100 * 2**20 - CACHED
    assert observer.facts()["driver"] == "999.1"
    assert observer.facts()["device_used_bytes"] == 900
    nvml.processes = nvml.processes[1:]  # a container: the only process there must be ours
    assert observer.memory().process_bytes == 1
    nvml.processes = nvml.processes * 2
    assert observer.memory().process_bytes is None


def test_utilization_is_that_of_the_timed_steps(cuda, monkeypatch):
    nvml = FakeNvml()
    install(monkeypatch, cuda, nvml)
    observer = observer_of(cuda)
    observer.begin_step(0, "warmup")
    assert observer.utilization() is None
    observer.begin_step(1, "timed")
    assert observer.utilization() is None  # no sample yet
    began = time.time_ns() // 1000
    nvml.samples = [(began - 10**6, 1), (began + 10**6, 80), (began + 2 * 10**6, 100)]
    assert observer.utilization() == pytest.approx(0.9)
    observer.begin_step(2, "recorded")
    nvml.samples = [(began + 3 * 10**6, 0)]
    assert observer.utilization() == pytest.approx(0.9)


def test_a_machine_without_nvml(cuda, monkeypatch):
    nvml = FakeNvml()
    nvml.works = False
    install(monkeypatch, cuda, nvml)
    observer = observer_of(cuda)
    run(cuda, observer)
    assert observer.memory().process_bytes is None
    assert observer.memory().cuda_context_bytes is None
    assert observer.utilization() is None
    assert observer.facts()["driver"] is None
    assert "Library Not Found" in observer.facts()["nvml_unavailable"]


def test_processes_that_may_not_be_seen(cuda, monkeypatch):
    def refuse(handle):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", refuse)
    assert observer_of(cuda).memory().process_bytes is None


def test_hardware_has_the_tables_ceilings_where_the_name_is_known(cuda):
    observer = observer_of(cuda)
    summary = observer.hardware("bf16")
    assert (summary.name, summary.kind, summary.memory_bytes) == ("NVIDIA H200", "cuda", 141 * 10**9)
    assert summary.peak_flops == 989.5e12  # the H200 datasheet's 1,979 with sparsity, halved
    cuda.name = "Tesla T4"
    assert observer.hardware("bf16").peak_flops is None  # it has no bf16 units
    assert observer.hardware("fp16").peak_flops == 65e12
    cuda.name = "A GPU of next year"
    assert observer.hardware("bf16").peak_flops is None


def test_every_device_of_the_table_has_a_drivers_name():
    assert sorted(TABLE_NAMES.values()) == sorted(hardware_names())
    for name in TABLE_NAMES.values():
        assert find_hardware(name).name == name


@pytest.mark.parametrize("with_history", [True, False])
def test_a_leak_is_found_by_the_allocators_own_count(with_history, cuda, tmp_path, monkeypatch):
    """2 KiB a step are never freed; the counter is read once a step, after the one synchronization."""
    monkeypatch.setattr(
        measuring, "device_observer", lambda *_, **__: observer_of(cuda, with_history=with_history)
    )

    def train_step(training, batches, num_tokens, observer):
        with observer.phase("forward"):
            cuda.alloc(2 * KIB)
            cuda.now_ms += 1
        with observer.phase("backward"):
            cuda.free(cuda.alloc(KIB))
        return torch.tensor(1.0)

    monkeypatch.setattr("harness.training.loop.train_step", train_step)
    recipe = tiny(warmup_steps=1, steps=4)
    folder = RunFolder(tmp_path / "run", "tiny", recipe)
    profile = measure(recipe, folder, SimpleNamespace(step=lambda *_: None), CPU, snapshot=with_history)
    leak = profile.leak
    assert leak is not None
    assert (leak.bytes_per_step, leak.num_steps) == (2 * KIB, 4)
    assert cuda.calls.count("synchronize") == 1 + 4 + 2
    if with_history:
        assert leak.by_category == {"activations": 2 * KIB}
        assert leak.largest is not None
        assert leak.largest.stack == ["model.py:1 forward"]
    assert "2.0 KiB more allocated after each of 4 steps" in profile.warnings[0]


def test_out_of_memory_on_a_gpu_is_a_profile_with_all_that_is_known(cuda, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "device_observer", lambda *_, **__: observer_of(cuda))

    def train_step(training, batches, num_tokens, observer):
        with observer.phase("forward"):
            cuda.alloc(2**30)
            cuda.alloc(2**29)
            cuda.fail(2**31)  # the last thing that happens

    monkeypatch.setattr("harness.training.loop.train_step", train_step)
    recipe = tiny(micro_batch_size=64, seq_len=64)
    folder = RunFolder(tmp_path / "run", "tiny", recipe)
    profile = measure(recipe, folder, SimpleNamespace(step=lambda *_: None), CPU, advise=advise)
    assert not profile.complete
    assert cuda.metadata == ""  # of the phase that failed
    oom = profile.oom
    assert oom is not None
    assert (oom.phase, oom.requested_bytes, oom.free_bytes) == ("forward", 2**31, 12345)
    assert oom.reserved_unallocated_bytes == CACHED
    assert [(top.size_bytes, top.category, top.stack) for top in oom.top[:2]] == [
        (2**30, "activations", ["model.py:1 forward"]),
        (2**29, "activations", ["model.py:1 forward"]),
    ]
    assert any("micro_batch_size=1" in line and " less, time a token ×" in line for line in oom.advice)
    trace = read_snapshot(tmp_path / "run" / "snapshot.pickle")["device_traces"][0]
    assert "oom" in [entry["action"] for entry in trace]
    said = explain_oom(profile)
    assert "out of memory in forward, asking for 2.00 GiB on NVIDIA H200" in said
    assert "1.00 GiB of activations, 0.50 GiB of activations" in said
