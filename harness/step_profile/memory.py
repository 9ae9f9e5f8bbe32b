"""A step's memory: how high it goes, and what it is made of at its peak."""

from typing import Annotated, Literal

from pydantic import Field

from harness.step_profile.fields import Count, Fields

MOST_STEPS = 1000
MOST_MODULES = 1000
"""How many steps and modules a profile lists at most; a simulation names the 200 largest modules."""
CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "activations",
    "temporaries",
    "inputs",
    "other",
    "gathered_parameters",
)


class MemoryBreakdown(Fields):
    """The bytes live at the peak, by what they are. The fields add up to the peak."""

    parameters_bytes: Count | None = None
    """Weights, frozen or trained, with quantization scales and buffers."""
    gradients_bytes: Count | None = None
    optimizer_state_bytes: Count | None = None
    """Moments, fp32 master copies, GradScaler's scalars."""
    activations_bytes: Count | None = None
    """What autograd saved: allocated in forward and freed in backward."""
    temporaries_bytes: Count | None = None
    """Everything else that the step allocated and freed."""
    inputs_bytes: Count | None = None
    other_bytes: Count | None = None
    """Workspaces of libraries, and what else was there before the step."""
    gathered_parameters_bytes: Count | None = None
    """FSDP2's weights while they are whole, and the all-gather outputs that they are copied from."""

    def by_category(self) -> dict[str, int | None]:
        """The bytes of each category, in the order of CATEGORIES; None where they are not known."""
        return {name: getattr(self, f"{name}_bytes") for name in CATEGORIES}

    def total_bytes(self) -> int:
        """Sum of the known categories, in bytes."""
        return sum(size or 0 for size in self.by_category().values())


class StepPeak(Fields):
    """What the memory of one recorded step was made of at its peak."""

    step: Count
    """Counted from 0, as in log.jsonl."""
    at_peak: MemoryBreakdown
    """Adds up to the peak; on a GPU by the requested sizes, before the allocator rounds them."""


class MemoryStats(Fields):
    """Memory of the steady step. Setup and the first step have their own peaks, never mixed in."""

    kind: Literal["cuda_allocator", "simulated_allocator", "live_tensors", "closed_form"]
    """What "allocated" means here. live_tensors: bytes of live CPU tensors followed by a dispatch mode."""
    peak_allocated_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None
    process_bytes: Count | None = None
    """The whole process on the device, as NVML sees it."""
    peak_phase: str | None = None
    peak_step: Count | None = None
    """The step with the peak, in a watched loop only; counted from 0, as in log.jsonl."""
    at_peak: MemoryBreakdown = Field(default_factory=MemoryBreakdown)
    at_peak_by_step: list[StepPeak] = Field(default_factory=list[StepPeak], max_length=MOST_STEPS)
    """The breakdown at the peak of each step that a measurement recorded, of the first MOST_STEPS."""
    at_peak_by_module: (
        Annotated[dict[Annotated[str, Field(max_length=300)], Count], Field(max_length=MOST_MODULES)] | None
    ) = None
    """The bytes live at the peak by the path of the module they belong to, the largest first. A large model's
    smaller modules are summed by kind (`layers.*.mlp`), the rest of the peak is under "(other modules)" and
    "(no module)". Only a simulation knows it."""
    host_bytes: Count | None = None
    """Offloaded and paged bytes in host memory at their largest. In a measurement pinned memory counts as
    PyTorch takes it from the host: in powers of two, and with what it keeps for reuse."""
    fragmentation_bytes: Count | None = None
    """Reserved minus allocated, at the peak of reserved."""
    cuda_context_bytes: Count | None = None
    setup_peak_allocated_bytes: Count | None = None
    first_step_peak_allocated_bytes: Count | None = None

    def taken_bytes(self) -> int | None:
        """The bytes that the process takes of the device: as NVML sees it, else what is reserved, else what
        is allocated, with the CUDA context where its size is known. None where no peak is known.
        """
        if self.process_bytes is not None:
            return self.process_bytes
        held = self.peak_allocated_bytes if self.peak_reserved_bytes is None else self.peak_reserved_bytes
        return None if held is None else held + (self.cuda_context_bytes or 0)
