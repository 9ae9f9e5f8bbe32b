"""Host memory is checked before a run that will need much of it."""

from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from harness.errors import InputError
from harness.fit.host_memory import Available, available_memory, check_host_memory, host_needs
from harness.hardware.hardware import find_hardware
from harness.recipe.recipe import Recipe
from harness.simulate.simulated_run import simulate
from tests.support.tiny import ByteObserver, step, tiny
from tests.support.tiny import built as built_on_cpu

GIB = 2**30
LLAMA_8B = 8_030_261_248
"""Parameters of Llama-3.1-8B, from its model card's safetensors index (16,060,522,496 bytes in bf16)."""


def plenty(size: int) -> Available:
    return Available(size, "the system")


def test_what_offload_needs_by_hand():
    """bf16 weights, gradients and two moments: 2 + 2 + 2 + 2 bytes a parameter, all on the host."""
    needs = host_needs(Recipe(model="llama-3.1-8b", offload=("parameters",), optimizer_impl="fused"), "cuda")
    assert needs["parameters"] == pytest.approx(2 * LLAMA_8B, rel=1e-6)  # and the rotary table
    assert needs["gradients"] == 2 * LLAMA_8B
    assert needs["optimizer state"] == pytest.approx(4 * LLAMA_8B, rel=1e-6)  # and the step counters
    on_device = host_needs(Recipe(model="llama-3.1-8b", offload=("optimizer",), master_weights=True), "cuda")
    assert "parameters" not in on_device
    assert on_device["optimizer state"] == pytest.approx(12 * LLAMA_8B, rel=1e-6)  # fp32 copy, two moments


@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_what_offload_needs_is_what_a_real_step_takes(offload):
    """Against the storages that a step of a real model makes in host memory."""
    recipe = tiny(offload=(offload,))
    observer = ByteObserver()
    training, batches = built_on_cpu(recipe, observer)
    for _ in range(2):
        step(training, batches, observer)
    assert sum(host_needs(recipe, "cuda").values()) == pytest.approx(observer.host_peak_bytes, rel=1e-3)


def test_what_activations_need_is_what_a_simulated_step_takes():
    """With CUDA's attention, which keeps less than a CPU's."""
    recipe = tiny(offload=("activations",), precision="bf16", seq_len=256)
    simulated = simulate(recipe, find_hardware("a100-80gb"))[0].memory.host_bytes
    assert sum(host_needs(recipe, "cuda").values()) == pytest.approx(simulated, rel=0.05)


def test_too_little_is_said_with_the_arithmetic():
    recipe = Recipe(model="llama-3.1-8b", offload=("parameters",))
    with pytest.raises(InputError) as caught:
        check_host_memory(recipe, "cuda", Available(32 * GIB, "the memory limit of /sys/fs/cgroup/job"))
    said = str(caught.value)
    assert said.startswith("offload: [parameters]: this needs ")
    assert "(parameters 14.96 GiB, gradients 14.96 GiB, optimizer state 29.92 GiB" in said
    assert "and the memory limit of /sys/fs/cgroup/job leaves 32.00 GiB" in said
    assert "GiB are missing. Free memory" in said
    assert caught.value.exit_status == 2


def test_the_border_is_what_is_needed():
    recipe = tiny(offload=("optimizer", "activations"))
    needed = sum(host_needs(recipe, "cuda").values())
    assert check_host_memory(recipe, "cuda", plenty(needed)) is None
    with pytest.raises(InputError, match=r"offload: \[optimizer, activations\]: .*: 1 B are missing"):
        check_host_memory(recipe, "cuda", plenty(needed - 1))


def test_on_a_cpu_the_step_is_in_the_same_memory():
    recipe = tiny(offload=("optimizer",))
    only_offloaded = sum(host_needs(recipe, "cuda").values())
    with pytest.raises(InputError, match="the step itself, which runs there too"):
        check_host_memory(recipe, "cpu", plenty(only_offloaded))


def test_quantizing_a_checkpoint_holds_its_largest_weight():
    """Llama-3.1-8B's largest linear layers are 14336 x 4096, in bf16."""
    recipe = Recipe(model="llama-3.1-8b", quantization="nf4", adapter="lora", weights="pretrained")
    assert sum(host_needs(recipe, "cuda").values()) == 14336 * 4096 * 2
    with pytest.raises(InputError, match=r"quantization: nf4 with weights: pretrained: this needs 0\.11 GiB"):
        check_host_memory(recipe, "cuda", plenty(14336 * 4096))
    random = recipe.model_copy(update={"weights": "random"})  # made on the device, layer by layer
    assert check_host_memory(random, "cuda", plenty(0)) is None


def test_what_needs_nothing_is_not_checked():
    assert check_host_memory(Recipe(model="no such model"), "cuda", plenty(0)) is None


def test_a_model_that_arithmetic_does_not_know_is_said_to_be_unchecked(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "of-somebody", "hidden_size": 64, "vocab_size": 100}')
    said = check_host_memory(Recipe(model=str(config), offload=("optimizer",)), "cuda", plenty(0))
    assert said is not None
    assert said.startswith("host memory was not checked before the run: ")


# What is there ----------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that writes files of /proc and /sys below a folder; the system has 100 GiB available."""
    memory = namedtuple("memory", "available")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory(100 * GIB))

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


def test_without_control_groups_the_system_says(machine):
    assert available_memory(machine({})) == Available(100 * GIB, "the system")


def test_the_tightest_of_nested_groups_counts(machine):
    """Version 2: 8 GiB for the job, of which 3 are used and 1 of these is only cached files."""
    root = machine(
        {
            "proc/self/cgroup": "0::/batch/job\n",
            "sys/fs/cgroup/batch/job/memory.max": "max\n",
            "sys/fs/cgroup/batch/job/memory.current": "5\n",
            "sys/fs/cgroup/batch/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/batch/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/batch/memory.stat": f"anon 3\nactive_file 9\ninactive_file {GIB}\n",
        }
    )
    assert available_memory(root) == Available(6 * GIB, f"the memory limit of {root}/sys/fs/cgroup/batch")


def test_a_container_sees_its_own_group_as_the_root(machine):
    """Version 1: the path is the host's, and what is mounted is the group itself."""
    root = machine(
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/docker/1\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
        }
    )
    assert available_memory(root).size_bytes == 3 * GIB


def test_no_limit_is_a_very_large_one(machine):
    """Version 1 writes 2**63 rounded down to a page."""
    root = machine(
        {
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
        }
    )
    assert available_memory(root) == Available(100 * GIB, "the system")


def test_this_machine_has_memory():
    found = available_memory()
    assert 0 < found.size_bytes <= psutil.virtual_memory().total
