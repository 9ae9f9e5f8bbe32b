"""Part "traces": every action of the allocator in runs of small but real recipes, from the first on.

These are what the models of the allocator and of the step are held against.
"""

import base64
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu_programme.recipes import TRACES, Spec, named_config, with_layers
from benchmarks.gpu_programme.tasks import LIGER_IS_TRITON, Context, Piece, Result, modules_of
from harness.hardware.hardware import DEFAULT_HARDWARE

STATS = (
    *(f"{name}_bytes.all" for name in ("allocated", "requested", "active", "reserved", "inactive_split")),
    "allocation.all",
    "segment.all",
)
COUNTS = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free", "num_sync_all_streams")


def pieces(context: Context) -> list[Piece]:
    """One for each recipe of TRACES."""
    made = []
    for spec in TRACES:
        recipe = spec.recipe(tiny=context.tiny)
        fused = LIGER_IS_TRITON if recipe.loss == "fused_linear" else None
        fused = "flex attention trains on a GPU alone" if recipe.flex else fused
        environment = spec.environment | _settings(spec.room_bytes, context)
        allocator = "it is about the CUDA allocator's settings" if environment else None
        made.append(
            Piece(
                spec.name,
                record,
                {"spec": spec},
                modules_of(recipe),
                gpu_only=fused or allocator,
                environment=environment,
                new_interpreter=bool(environment),
            )
        )
    return made


def _settings(room_bytes: int | None, context: Context) -> dict[str, str]:
    """What leaves the allocator so many bytes: the setting is a fraction of the device's memory."""
    if room_bytes is None:
        return {}
    from benchmarks.predict import table_name
    from harness.hardware.hardware import find_hardware

    name = table_name() if context.device == "cuda" else None
    fraction = room_bytes / find_hardware(name or DEFAULT_HARDWARE).memory_bytes
    return {"PYTORCH_CUDA_ALLOC_CONF": f"per_process_memory_fraction:{fraction:.4f}"}


def record(context: Context, spec: Spec) -> Result:
    """Set up and run three steps under memory history; the trace of it all, encoded.

    Running out of memory is a result too: the trace up to there.
    """
    import torch

    from benchmarks.gpu_programme.trace_file import Trace, encode_trace
    from harness.system.versions import provenance
    from harness.training.loop import Kind, run_steps, set_up

    device = torch.device(context.device)
    losses: list[float] = []
    oom = None
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # the compiler has measured nothing yet
        whole = spec.recipe(tiny=context.tiny)
        layers = None if context.tiny else spec.layers
        recipe = with_layers(whole, layers, Path(folder))
        watching = _Watching(device)
        try:
            training, batches = set_up(recipe, device, watching)
            watching.observer.trained(training)
            # "recorded" after "warmup": the history goes on, it is not begun anew
            kinds: list[Kind] = ["warmup", "recorded", "recorded"]
            for step in run_steps(training, batches, device, kinds, watching):
                watching.observer.end_step()
                losses.append(float(step.loss))
        except torch.OutOfMemoryError as error:
            oom = str(error)
        snapshot = watching.observer.history().snapshot
    hardware = watching.observer.hardware(recipe.compute_dtype)
    label = whole.model if layers is None else f"{whole.model}-{layers}-layers"
    trace = Trace(
        name=spec.name,
        recipe_fields={**recipe.model_dump(mode="json"), "model": label},
        model_config=None if layers is None else {**named_config(whole.model), "num_hidden_layers": layers},
        device={"name": hardware.name, "kind": hardware.kind, "memory_bytes": hardware.memory_bytes},
        provenance={**provenance(), **watching.observer.facts()},
        allocator_settings=snapshot.get("allocator_settings", {}),
        entries=snapshot["device_traces"][device.index or 0],
        segments=[s for s in snapshot["segments"] if s["device"] == (device.index or 0)],
        phases=watching.stats,
        losses=[loss if math.isfinite(loss) else None for loss in losses],
        oom=oom,
    )
    data = encode_trace(trace)
    return {
        "status": "ok" if oom is None else "oom",
        "events": len(trace.entries),
        "trace_bytes": len(data),
        "losses": trace.losses,
        "trace": base64.b64encode(data).decode(),
    }


class _Watching:
    """The device's own observer, and torch's statistics at the end of every phase (none on a CPU)."""

    def __init__(self, device: Any) -> None:
        if device.type == "cuda":
            from harness.measure.cuda import CudaObserver

            self.observer: Any = CudaObserver(device, with_history=True)
        else:
            from harness.measure.cpu import CpuObserver

            self.observer = CpuObserver()
        self.stats: list[dict[str, Any]] = []
        self._step = -1

    def begin_step(self, index: int, kind: Any) -> None:
        """See loop.LoopObserver."""
        self._step = index
        self.observer.begin_step(index, kind)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See step.Observer."""
        import torch

        with self.observer.phase(name):
            yield
            stats = torch.cuda.memory_stats()
            kept = {f"{key}.{end}": stats.get(f"{key}.{end}") for key in STATS for end in ("current", "peak")}
            counts = {key: stats.get(key) for key in COUNTS}
            self.stats.append({"step": self._step, "phase": name, **kept, **counts})
