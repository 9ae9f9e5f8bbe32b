"""A simulation of a type of model, held against the peaks that PyTorch counted on the virtual GPU."""

from pathlib import Path

from benchmarks.causal_models.__main__ import GPU, config_file
from benchmarks.causal_models.steps import recipe_of
from benchmarks.traces import THREE_STEPS
from harness.hardware import find_hardware
from harness.simulate import simulate


def check_peaks(emulated: dict[str, int], kind: str, method: str, folder: Path) -> None:
    """Train `kind` by `method` of benchmarks.causal_models, its config in `folder`."""
    config = config_file(kind, folder)
    assert isinstance(config, Path), config
    recipe = recipe_of(config, method).model_copy(update=THREE_STEPS)
    memory = simulate(recipe, find_hardware(GPU))[0].memory
    assert memory.first_step_peak_allocated_bytes == emulated["first step"]
    assert memory.peak_allocated_bytes == emulated["allocated"]
    assert memory.peak_reserved_bytes == emulated["reserved"]
