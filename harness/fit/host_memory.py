"""Whether the host has the memory that offloading and quantizing will need. Imports no torch.

A GPU that runs out of memory raises an error, but a host that runs out kills the process, and hours of
training with it. What is needed is napkin's arithmetic. What is available is the least of what the system
reports and of what is left in each control group of the process (a container, a batch job).
"""

from dataclasses import dataclass
from pathlib import Path

from harness.errors import InputError
from harness.hardware import find_hardware
from harness.napkin import estimate
from harness.recipe import Recipe
from harness.units import in_gib

ANY_GPU = "a100-80gb"
"""Stands for the GPU in napkin's arithmetic: what a step keeps in host memory does not depend on it."""


@dataclass(frozen=True)
class Available:
    """Host memory that the process can still take."""

    size_bytes: int
    limit: str
    """What sets the limit, in words."""


def check_host_memory(recipe: Recipe, device_type: str, available: Available | None = None) -> str | None:
    """Raise InputError if `recipe` offloads or quantizes more than the host has room for.

    `device_type` is `cuda`, or `cpu`, where the step itself takes host memory too. Returns a sentence if
    napkin cannot estimate the model, and None if there is room, or nothing is offloaded or quantized.
    """
    quantizes = recipe.quantized and recipe.weights == "pretrained"
    if not recipe.offload and not quantizes:
        return None
    try:
        needs = host_needs(recipe, device_type)
    except InputError as error:
        return f"host memory was not checked before the run: {error}"
    available = available or available_memory()
    needed = sum(needs.values())
    if needed <= available.size_bytes:
        return None
    offload = f"offload: [{', '.join(recipe.offload)}]" if recipe.offload else ""
    cause = offload or f"quantization: {recipe.quantization} with weights: pretrained"
    parts = ", ".join(f"{name} {in_gib(size)}" for name, size in needs.items() if size)
    raise InputError(
        f"{cause}: this needs {in_gib(needed)} of host memory ({parts}), and {available.limit} leaves "
        f"{in_gib(available.size_bytes)}: {in_gib(needed - available.size_bytes)} are missing. "
        "Free memory, raise the limit, or take a smaller model, micro_batch_size or less offload."
    )


def host_needs(recipe: Recipe, device_type: str) -> dict[str, int]:
    """The bytes of host memory that the run will hold at once, by a description of each part."""
    memory = estimate(recipe, find_hardware(ANY_GPU))
    needs = dict(memory.host_parts)
    if recipe.quantized and recipe.weights == "pretrained":
        # transformers (5.17 to 5.23) loads one tensor after the other when it quantizes what it loads
        needs["the largest weight before it is quantized"] = memory.quantizing_bytes
    if device_type == "cpu":
        needs["the step itself, which runs there too"] = memory.peak.total_bytes
    return needs


def available_memory(root: Path = Path("/")) -> Available:
    """The host memory that this process can still take. `root` is the folder that has /proc and /sys."""
    import psutil

    found = [Available(psutil.virtual_memory().available, "the system")]
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return found[0]
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            found += _limits(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += _limits(root / "sys/fs/cgroup/memory", path, *names)
    return min(found, key=lambda each: each.size_bytes)


def _limits(mount: Path, path: str, limit: str, usage: str, reclaimable: str) -> list[Available]:
    """What is left in the control group at `path` and in each group around it, as far as they are visible.

    `limit` and `usage` are the names of a group's files with these numbers, and `reclaimable` is the line in
    its memory.stat with what the kernel can take back.
    """
    found: list[Available] = []
    group = mount / path.strip("/")
    for folder in [group, *group.parents]:
        if not folder.is_relative_to(mount):
            break
        numbers = [_number(folder / limit, limit), _number(folder / usage, usage)]
        if numbers[0] is not None and numbers[1] is not None:
            left = numbers[0] - numbers[1] + (_number(folder / "memory.stat", reclaimable) or 0)
            found.append(Available(max(0, left), f"the memory limit of {folder}"))
    return found


def _number(path: Path, name: str) -> int | None:
    """The number in a control group's file, or of the line `name` in its memory.stat; None for "max"."""
    try:
        text = path.read_text()
    except OSError:  # not visible from here, or no such controller
        return None
    if path.name == "memory.stat":
        text = next((line.split()[1] for line in text.splitlines() if line.startswith(f"{name} ")), "0")
    return None if text.strip() == "max" else int(text)
