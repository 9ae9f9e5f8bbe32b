"""What the hardware programme would bring back from a GPU, written by hand, for the tests of who reads it."""

import base64
from typing import Any

from benchmarks.gpu_programme.trace_file import Trace, encode_trace
from harness.recipe.recipe import Recipe
from harness.step_profile import (
    HardwareSummary,
    MemoryBreakdown,
    MemoryStats,
    OutOfMemoryReport,
    PhaseStats,
    StepProfile,
    StepStats,
    TimeStats,
)

GIB = 2**30
RECIPE = Recipe(model="llama-3.1-8b", adapter="lora", data="synthetic").model_dump(mode="json")
PROVENANCE: dict[str, Any] = {
    "harness": "0.1.0",
    "git_commit": None,
    "git_dirty": None,
    "time": "2026-01-02T03:04:05+00:00",
    "python": "3.12.3",
    "platform": "Linux-6.8.0-1013-someones-x86_64-with-glibc2.39",
    "versions": {"torch": "2.11.0+cu130", "transformers": "5.17.0"},
    "settings": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
}
DEVICE: dict[str, Any] = {
    "name": "NVIDIA H200",
    "kind": "cuda",
    "memory_bytes": 150_000_000_000,
    "table_name": "h200",
    "driver": "999.1",
}


def document(part: str, *results: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A file of the programme."""
    return {
        "format": "harness-gpu",
        "version": 1,
        "part": part,
        "tiny": False,
        "started": "2026-01-02T03:04:05+00:00",
        "device": DEVICE,
        "provenance": PROVENANCE,
        "results": list(results),
        **fields,
    }


def ok(name: str, **made: Any) -> dict[str, Any]:
    """A piece that went well."""
    return {"name": name, "status": "ok", "seconds": 1.5, "result": made}


def profile(
    source: str, peak_gib: float, *, activations_gib: float = 4.0, step_s: float = 0.5, **fields: Any
) -> dict[str, Any]:
    """A profile whose peak is in backward: activations, and parameters for the rest. Reserved is 2 GiB more,
    the process 1 GiB more than that.
    """
    peak = round(peak_gib * GIB)
    activations = min(peak, round(activations_gib * GIB))
    kind: Any = {"measured": "cuda_allocator", "simulated": "simulated_allocator", "napkin": "closed_form"}[
        source
    ]
    built = StepProfile(
        source=source,  # type: ignore[arg-type]
        recipe=RECIPE,
        hardware=HardwareSummary(
            name="NVIDIA H200" if source == "measured" else "h200",
            kind="cuda" if source == "measured" else "table",
        ),
        provenance=PROVENANCE,
        memory=MemoryStats(
            kind=kind,
            peak_allocated_bytes=peak,
            peak_reserved_bytes=peak + 2 * GIB,
            process_bytes=peak + 3 * GIB,
            peak_phase="backward",
            at_peak=MemoryBreakdown(parameters_bytes=peak - activations, activations_bytes=activations),
        ),
        phases={"backward": PhaseStats(peak_allocated_bytes=peak)},
        step=StepStats(time_s=TimeStats(median=step_s, n=3), tokens_per_s=2048 / step_s, mfu=0.25),
    )
    return built.model_copy(update=fields).model_dump(mode="json")


def out_of_memory() -> OutOfMemoryReport:
    """A run that ran out."""
    return OutOfMemoryReport(phase="forward", requested_bytes=GIB, free_bytes=1)


def trace_of(entries: list[dict[str, Any]], segments: list[dict[str, Any]], **fields: Any) -> Trace:
    """A trace of these entries and segments."""
    known: dict[str, Any] = {
        "name": "by-hand",
        "recipe_fields": RECIPE,
        "model_config": None,
        "device": DEVICE,
        "provenance": PROVENANCE,
        "allocator_settings": {},
        "entries": entries,
        "segments": segments,
        "phases": [],
        "losses": [],
        "oom": None,
    }
    return Trace(**known | fields)


def encoded(trace: Trace) -> str:
    """A trace as the programme's JSON holds it."""
    return base64.b64encode(encode_trace(trace)).decode()
