"""Running a command on virtual GPUs: it takes the place of this process, so that its end is its own."""

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
"""On PYTHONPATH: its sitecustomize.py waits for torch in every Python process."""
MOST_GPUS = 64


@dataclass(frozen=True)
class Options:
    """What virtual GPUs a command gets."""

    gpu: str
    gpus: int = 1
    values: bool = True
    """Whether data of the host keeps its values, and integers that follow from it are true."""
    routing: Literal["balanced", "worst"] = "balanced"
    out: Path | None = None
    """A folder for every process's allocator statistics and memory history."""
    world_size: int | None = None
    """Run one rank alone, of so many; the others are answered for."""
    rank: int = 0
    late: bool = False
    """Whether what is put on a stream is done when the host has waited for it, and not at once."""
    clock: bool = True
    """Whether what is put on a stream takes the time that is estimated for it."""
    real_time: bool = False
    """Whether who waits for the device really waits, so that the host's own clock shows it."""


def surroundings(options: Options, environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` as a process on the virtual GPUs has it; the libraries are compiled if need be.

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
    variables = device_variables(options.gpu, options.gpus)
    loaded = libraries()

    def in_front(name: str, *values: object) -> str:
        return os.pathsep.join(filter(None, [*map(str, values), environment.get(name)]))

    made = {
        **environment,
        **variables,
        "LD_PRELOAD": in_front("LD_PRELOAD", *loaded),
        "LD_LIBRARY_PATH": in_front("LD_LIBRARY_PATH", loaded[0].parent),  # for who opens libcuda.so by name
        "PYTHONPATH": in_front("PYTHONPATH", STARTUP),
        "PATH": in_front("PATH", STARTUP / "bin"),
        "TRITON_LIBCUDA_PATH": str(loaded[0].parent),
        "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "0",
        "VIRTUAL_GPU_VALUES": str(int(options.values)),
        "VIRTUAL_GPU_ROUTING": options.routing,
        "VIRTUAL_GPU_LATE": str(int(options.late)),
        "VIRTUAL_GPU_CLOCK": str(int(options.clock)),
        "VIRTUAL_GPU_REAL_TIME": str(int(options.real_time)),
        "VIRTUAL_GPU_SUMMARY": "1",
        "VIRTUAL_GPU_LIBRARIES": str(loaded[0].parent),
        "VIRTUAL_GPU_HARNESS": str(PACKAGE.parent),
    }
    made.pop("CUDA_VISIBLE_DEVICES", None)  # of a real machine's devices
    made.pop("VIRTUAL_GPU_PROCESSES", None)  # of an `emulate` around this one
    if options.out is not None:
        made["VIRTUAL_GPU_OUT"] = made["VIRTUAL_GPU_TIMES"] = str(options.out.resolve())
    if options.world_size is not None:
        here = min(options.gpus, options.world_size)  # ranks of one machine
        made |= {"VIRTUAL_GPU_ALONE": "1", "WORLD_SIZE": str(options.world_size), "RANK": str(options.rank)}
        made |= {"LOCAL_RANK": str(options.rank % here), "LOCAL_WORLD_SIZE": str(here)}
        made |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return made


def emulate(command: Sequence[str], options: Options) -> NoReturn:
    """Become `command` on virtual GPUs: exit status and signals are the command's, and nothing is left
    behind.

    Raises InputError for a command that does not exist or cannot be run, and as `surroundings` does.
    """
    if not command:
        raise InputError(
            "there is no command. Write it after --: harness emulate --gpu h100 -- python train.py"
        )
    environment = surroundings(options, os.environ)
    program = shutil.which(command[0], path=environment.get("PATH"))
    if program is None:
        raise InputError(f"there is no command {command[0]}. Give a program on PATH, or its path.")
    if options.out is not None:
        make_folder(options.out)
    environment["VIRTUAL_GPU_MAIN"] = str(os.getpid())  # which stays what it is
    try:
        os.execve(program, list(command), environment)
    except OSError as error:
        raise InputError(
            f"{program} cannot be run: {error.strerror}. Give a program, or a script whose first line names "
            "its interpreter."
        ) from None


def outside(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without the virtual GPUs: for a process that runs beside and asks for no device."""
    made = {name: value for name, value in environment.items() if not name.startswith("VIRTUAL_GPU")}
    if len(made) == len(environment):
        return made
    ours = (str(STARTUP), made.get("TRITON_LIBCUDA_PATH") or str(STARTUP))
    for name in ("PYTHONPATH", "PATH", "LD_LIBRARY_PATH"):
        kept = [part for part in made.pop(name, "").split(os.pathsep) if not part.startswith(ours)]
        if any(kept):
            made[name] = os.pathsep.join(kept)
    for name in ("LD_PRELOAD", "TRITON_LIBCUDA_PATH"):
        made.pop(name, None)
    return made
