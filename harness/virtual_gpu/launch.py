"""Runs a command on virtual GPUs. The command replaces this process, so its exit status is its own."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from harness.errors import InputError
from harness.system import PACKAGE, make_folder
from harness.virtual_gpu.build import libraries
from harness.virtual_gpu.device import device_variables

STARTUP = Path(__file__).parent / "startup"
"""The folder that is put on PYTHONPATH: every Python process runs its sitecustomize.py as it starts."""
MOST_GPUS = 64


@dataclass(frozen=True)
class Options:
    """Which virtual GPUs a command gets, and how they behave."""

    gpu: str
    """The device's name in the hardware table."""
    gpus: int = 1
    """The number of virtual GPUs, from 1 to MOST_GPUS."""
    values: bool = True
    """Whether data of the host keeps its values, and integers that follow from it are true."""
    routing: Literal["balanced", "worst"] = "balanced"
    """How topk and argmax of scores that no kernel computed choose, as a router of experts does: every expert
    equally often, or always the first ones."""
    out: Path | None = None
    """A folder for every process's allocator statistics and memory history."""
    world_size: int | None = None
    """With a number, one rank of so many runs alone, and harness answers in the place of the others."""
    rank: int = 0
    """The rank that runs alone."""
    late: bool = False
    """Whether work on a stream is done only once the host has waited for it, instead of at once."""
    by_clock: bool = False
    """Whether work on a stream is done when the clock says so, instead of at once."""
    clock: bool = True
    """Whether work on a stream takes the time that is estimated for it."""
    real_time: bool = False
    """Whether a thread that waits for the device really sleeps, so that the host's own clock shows it."""


OVER = {"at_once": "0", "late": "1", "by_clock": "2"}
"""When work on a stream is over, for PyTorch's allocator, as c/streams.c counts."""
CHOICES = {
    "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS": "ATEN",
    "TORCHINDUCTOR_MAX_AUTOTUNE_CONV_BACKENDS": "ATEN",
}
"""What torch.compile's max-autotune chooses a product from, unless the user says otherwise: cuBLAS and cuDNN.
It would time Triton's products as well, a minute for each, and all of them take the same here."""


def surroundings(options: Options, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process on the virtual GPUs: `environment` with the libraries in LD_PRELOAD, and
    so on. Compiles the libraries if they are not in the cache.

    Raises InputError for an unknown device, and where no virtual GPU can be had.
    """
    if not 1 <= options.gpus <= MOST_GPUS:
        raise InputError(f"--gpus {options.gpus}: give a number from 1 to {MOST_GPUS}.")
    if options.world_size is not None and options.world_size < 1:
        raise InputError(f"--world-size {options.world_size}: there is at least one rank.")
    if options.world_size is not None and not 0 <= options.rank < options.world_size:
        raise InputError(
            f"--rank {options.rank}: with --world-size {options.world_size}, ranks count from 0."
        )
    if options.world_size is None and options.rank:
        raise InputError(f"--rank {options.rank}: of how many? Give --world-size too, to run one rank alone.")
    if options.by_clock and (options.late or not options.clock):
        raise InputError("--by-clock: leave out --late and --no-clock, which say otherwise.")
    variables = device_variables(options.gpu, options.gpus)
    preloaded = libraries()
    folder = preloaded[0].parent

    def in_front(name: str, *values: object) -> str:
        return os.pathsep.join(filter(None, [*map(str, values), environment.get(name)]))

    virtual = {
        **CHOICES,
        **environment,
        **variables,
        "LD_PRELOAD": in_front("LD_PRELOAD", *preloaded),
        "LD_LIBRARY_PATH": in_front("LD_LIBRARY_PATH", folder),  # for programs that open libcuda.so by name
        "PYTHONPATH": in_front("PYTHONPATH", STARTUP),
        "PATH": in_front("PATH", STARTUP / "bin"),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "0",
        "VIRTUAL_GPU_VALUES": str(int(options.values)),
        "VIRTUAL_GPU_ROUTING": options.routing,
        "VIRTUAL_GPU_OVER": OVER["by_clock" if options.by_clock else "late" if options.late else "at_once"],
        "VIRTUAL_GPU_CLOCK": str(int(options.clock)),
        "VIRTUAL_GPU_REAL_TIME": str(int(options.real_time)),
        "VIRTUAL_GPU_SUMMARY": "1",
        "VIRTUAL_GPU_LIBRARIES": str(folder),
        "VIRTUAL_GPU_HARNESS": str(PACKAGE.parent),
    }
    virtual.pop("CUDA_VISIBLE_DEVICES", None)  # it numbers a real machine's devices
    virtual.pop("VIRTUAL_GPU_PROCESSES", None)  # an `emulate` around this one has set it
    if options.out is not None:
        virtual["VIRTUAL_GPU_OUT"] = virtual["VIRTUAL_GPU_TIMES"] = str(options.out.resolve())
    if options.world_size is not None:
        local = min(options.gpus, options.world_size)  # ranks of one machine
        virtual |= {"VIRTUAL_GPU_ALONE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        virtual |= {"WORLD_SIZE": str(options.world_size), "RANK": str(options.rank)}
        virtual |= {"LOCAL_RANK": str(options.rank % local), "LOCAL_WORLD_SIZE": str(local)}
    return virtual


def not_found(word: str) -> str:
    """What to say of a command that is not there: an option that nobody knows is taken for one."""
    if word.startswith("-"):
        return f"there is no option {word}: --help lists them. A program follows after --."
    return f"there is no command {word}. Give a program on PATH, or its path."


def emulate(command: Sequence[str], options: Options) -> NoReturn:
    """Replace this process with `command` on virtual GPUs: exit status and signals are the command's.

    Raises InputError for a command that does not exist or cannot be run, and as `surroundings` does.
    """
    if not command:
        raise InputError(
            "there is no command. Write it after --: harness emulate --gpu h100 -- python train.py"
        )
    environment = surroundings(options, os.environ)
    program = shutil.which(command[0], path=environment.get("PATH"))
    if program is None:
        raise InputError(not_found(command[0]))
    if options.out is not None:
        make_folder(options.out)
    environment["VIRTUAL_GPU_MAIN"] = str(os.getpid())  # execve keeps the process number
    try:
        os.execve(program, list(command), environment)
    except OSError as error:
        raise InputError(
            f"{program} cannot be run: {error.strerror}. Give a program, or a script whose first line names "
            "its interpreter."
        ) from None


def outside(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what `surroundings` added: for a process that shall have no virtual GPU."""
    plain = {name: value for name, value in environment.items() if not name.startswith("VIRTUAL_GPU")}
    if len(plain) == len(environment):
        return plain
    ours = (str(STARTUP), plain.get("TRITON_LIBCUDA_PATH") or str(STARTUP))
    for name in ("PYTHONPATH", "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD"):
        parts = [part for part in plain.pop(name, "").split(os.pathsep) if not part.startswith(ours)]
        if any(parts):
            plain[name] = os.pathsep.join(parts)
    plain.pop("TRITON_LIBCUDA_PATH", None)
    for name, choice in CHOICES.items():
        if plain.get(name) == choice:
            del plain[name]
    return plain
