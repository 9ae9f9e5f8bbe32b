"""Programs of others, unchanged, with a tiny model: TRL 1.16, transformers 5.23, peft 0.21, accelerate 1.15,
bitsandbytes 0.50 (constraints.txt has the versions)."""

import re
import sys
from pathlib import Path

import pytest

from harness.hardware import find_hardware
from harness.recipe import load_recipe
from harness.simulate import simulate
from harness.step_profile import StepProfile
from harness.training import AfterStep

pytestmark = pytest.mark.virtual_gpu

PROGRAMS = Path(__file__).parent / "programs"
ALONE = [
    ("plain.py",),
    ("sft.py", "packing"),
    ("trainer.py", "qlora"),
    ("networks.py", "convolutions"),
    ("networks.py", "recurrent"),
    ("networks.py", "sampler"),
    ("networks.py", "graph"),
]
SLOW = [
    ("sft.py", "completion"),
    ("trainer.py", "full"),
    ("networks.py", "compiled"),
]
"""Each takes 20 s of a processor, and is near to one above: `make virtual-gpu-all` runs them."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
ACCELERATE = (
    sys.executable,
    "-m",
    "accelerate.commands.launch",
    "--config_file",
    str(PROGRAMS / "fsdp2.yaml"),
)


@pytest.mark.parametrize(
    "program", [*ALONE, *(pytest.param(program, marks=pytest.mark.slow) for program in SLOW)], ids=" ".join
)
def test_a_program_runs(emulate, program: tuple[str, ...]) -> None:
    name, *arguments = program
    assert "done: peak" in emulate(sys.executable, str(PROGRAMS / name), *arguments).stdout


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.slow),  # others here are under it
        pytest.param(ACCELERATE, id="accelerate, FSDP2"),
    ],
)
def test_trainer_on_two(emulate, launcher: tuple[str, ...]) -> None:
    kind = "lora" if launcher == TORCHRUN else "full"
    done = emulate(*launcher, str(PROGRAMS / "trainer.py"), kind, options=("--gpus", "2"))
    assert done.stdout.count("done: peak") == 2


def test_a_loop_over_fsdp2_on_two(emulate) -> None:
    """The token counts are of both ranks: each masks 10 tokens more of its 4 rows of 128 than the one
    before."""
    done = emulate(*TORCHRUN, str(PROGRAMS / "fsdp2.py"), options=("--gpus", "2"))
    said = re.findall(r"rank \d of 2: [^\n]*?, from \d", done.stdout)  # two write at once: lines may join
    assert len(said) == 2
    assert all(f"of 2: tokens {4 * (118 + 108)}, peak" in line and "rank 1, from 0" in line for line in said)


PARALLEL = ("ddp", "fsdp1", "tensor", "context")


@pytest.mark.parametrize(
    "kind", ["pipeline", *(pytest.param(kind, marks=pytest.mark.slow) for kind in PARALLEL)]
)
def test_a_model_on_two(emulate, kind: str) -> None:
    """A pipeline's stages tell each other their shapes, as objects."""
    done = emulate(*TORCHRUN, str(PROGRAMS / "parallel.py"), kind, options=("--gpus", "2"))
    for rank in range(2):
        assert re.search(rf"rank {rank} of 2: {kind}, peak [1-9]", done.stdout)


def test_integers_between_two(emulate) -> None:
    done = emulate(*TORCHRUN, str(PROGRAMS / "messages.py"), options=("--gpus", "2"))
    assert done.stdout.count("all as it must be") == 2


def test_collectives_of_two_are_true_or_said_to_be_unknown(emulate) -> None:
    """gloo, on the CPU, is the oracle. Small tensors are true but for floats that are not sums: 2 of 22."""
    done = emulate(*TORCHRUN, str(PROGRAMS / "collectives.py"), options=("--gpus", "2"))
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout
    for line in lines:
        _, true, _, unknown, _ = line.split()
        assert int(true) >= 20
        assert int(true) + int(unknown) == 44


def test_symmetric_memory_is_refused_in_words(emulate) -> None:
    code = """
import torch
import torch.distributed._symmetric_memory as symmetric
for asked in (
    lambda: symmetric.empty(1024, device="cuda"),
    lambda: symmetric.set_backend("CUDA"),
    lambda: symmetric.get_mem_pool(torch.device("cuda")),
    lambda: torch.distributed.ProcessGroupNCCL.mem_allocator.fget(None),  # of a process group
):
    try:
        asked()
    except RuntimeError as error:
        print(error)
symmetric.empty(1024, device="cuda")
"""
    done = emulate(code=code, status=1)
    assert done.stdout.count("a virtual GPU has no symmetric memory") == 4
    assert "RuntimeError: a virtual GPU has no symmetric memory" in done.stderr


@pytest.mark.parametrize("values", ["--values", "--no-values"])
@pytest.mark.parametrize("backend", ["nccl", "gloo", "cpu:gloo,cuda:nccl"])
def test_the_others_are_answered_for(emulate, backend: str, values: str) -> None:
    code = f"""
import os, torch, torch.distributed as dist
dist.init_process_group("{backend}")
device = "cpu" if "{backend}" == "gloo" else "cuda:" + os.environ["LOCAL_RANK"]
count, names = torch.tensor([3], device=device), [None] * dist.get_world_size()
dist.all_reduce(count)
dist.all_gather_object(names, dist.get_rank())
dist.barrier()
print(dist.get_rank(), dist.get_world_size(), names, count.item())
"""
    options = ("--gpus", "2", "--world-size", "4", "--rank", "1", values)
    said = emulate(code=code, options=options).stdout.strip()
    assert said.startswith("1 4 [1, 1, 1, 1] ")
    if values == "--values":
        assert said.endswith(" 12")


@pytest.mark.slow
def test_one_rank_of_a_recipe_alone(emulate, tmp_path: Path) -> None:
    """Any rank: it has a run folder to itself, saves its part, and takes what the simulation says."""
    changed = ["parallel=fsdp", "dp_shard=8", "steps=2", "warmup_steps=1", "data=synthetic"]
    emulate(
        *(
            sys.executable,
            "-m",
            "harness",
            "run",
            "smoke",
            *changed,
            "--phases",
            "train,save",
            "--out",
            "run",
        ),
        options=("--gpus", "8", "--world-size", "8", "--rank", "3"),
    )
    profile = StepProfile.read(tmp_path / "run" / "profile.json")
    recipe, hardware = load_recipe("smoke", changed)[1], find_hardware("h100")
    simulated = simulate(recipe, hardware, after=AfterStep(checkpoint=True))[0]
    assert (profile.source, profile.ranks) == ("emulated", None)
    assert profile.memory.peak_allocated_bytes == simulated.memory.peak_allocated_bytes
    assert profile.memory.peak_reserved_bytes == simulated.memory.peak_reserved_bytes
    saving, said = (each.phases["saving"].peak_allocated_bytes for each in (profile, simulated))
    assert saving == said


def test_one_rank_of_many_alone(emulate) -> None:
    done = emulate(
        *(sys.executable, str(PROGRAMS / "fsdp2.py")),
        options=("--gpus", "8", "--world-size", "512", "--rank", "3"),
    )
    assert f"rank 3 of 512: tokens {512 * 4 * (128 - 40)}, peak" in done.stdout


@pytest.mark.slow
def test_a_stage_of_a_pipeline_alone_takes_what_it_takes_among_the_others(emulate) -> None:
    command, two = (str(PROGRAMS / "parallel.py"), "pipeline", "shapes"), ("--gpus", "2")
    together = sorted(re.findall(r"rank \d of 2: .*", emulate(*TORCHRUN, *command, options=two).stdout))
    for rank in range(2):
        options = (*two, "--world-size", "2", "--rank", str(rank))
        assert emulate(sys.executable, *command, options=options).stdout.strip() == together[rank]
    said = emulate(sys.executable, *command[:2], options=options, status=1).stderr  # without the shapes
    assert "stage 1 of a pipeline runs alone on this virtual GPU" in said
