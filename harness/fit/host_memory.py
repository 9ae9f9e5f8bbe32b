"""Whether the host has the memory that a run will ask of it: offloading and quantizing. Imports no torch.

A GPU that runs out says so; a host that runs out kills the process, and its hours with it. What is needed
is napkin's arithmetic. What is there is the least of what the system calls available and of what each
control group that the process is in (a container, a batch job) leaves.
"""

from dataclasses import dataclass
from pathlib import Path

from harness.errors import InputError
from harness.hardware import find_hardware
from harness.napkin import estimate
from harness.recipe import Recipe
from harness.units import in_gib

ANY_GPU = "a100-80gb"
"""What a step keeps in host memory does not depend on the GPU."""


@dataclass(frozen=True)
class Available:
    """Bytes that can still be taken, and who says so."""

    size_bytes: int
    limit: str


def check_host_memory(recipe: Recipe, device_type: str, available: Available | None = None) -> str | None:
    """Raise InputError if `recipe` offloads or quantizes more than the host has room for.

    `device_type`: cuda, or cpu, where the step itself is in the same memory. Returns a sentence if nothing
    can be said about the model; None if there is room, or nothing to ask for.
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
    """Bytes of host memory that the run will hold at once, by what they are."""
    memory = estimate(recipe, find_hardware(ANY_GPU))
    needs = dict(memory.sizes.host_parts)
    if recipe.quantized and recipe.weights == "pretrained":
        # transformers (5.17 to 5.23) loads one tensor after the other when it quantizes what it loads
        needs["the largest weight before it is quantized"] = memory.sizes.quantizing_bytes
    if device_type == "cpu":
        needs["the step itself, which runs there too"] = memory.peak.total_bytes
    return needs


def available_memory(root: Path = Path("/")) -> Available:
    """What this process can still take of the host's memory. `root`: where /proc and /sys are."""
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
    """What the group at `path` and every group around it leave. In a container they may not be visible."""
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
