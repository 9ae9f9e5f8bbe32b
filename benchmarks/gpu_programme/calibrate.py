"""Part "calibrate": what the host and its link reach, and what the libraries take for themselves.

The measurements are kept as they are; `calibration_of` takes from them what
harness.hardware.hardware.Calibration needs and harness/kernel_time does not estimate.
"""

import statistics
import time
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.gpu_programme.kernels import host_link, host_optimizer, host_speed, random
from benchmarks.gpu_programme.tasks import Context, Piece, Result
from harness.hardware.hardware import find_hardware

HOST_BOUND: dict[str, Any] = {
    "model": "llama-3.2-1b",
    "adapter": "lora",
    "seq_len": 16,
    "learning_rate": 1e-5,
}
"""A step whose kernels end sooner than Python can launch the next."""
STEPS = 10


def pieces(context: Context) -> list[Piece]:
    """One for each rate of the host and its link, and one for what the libraries allocate."""
    allocator = "the workspaces are the CUDA libraries'"
    return [
        Piece("host-link", host_link),
        Piece("host-optimizer", host_optimizer),
        Piece("launch", launch, modules=("peft",)),
        Piece("cublas", cublas, gpu_only=allocator),
    ]


def launch(context: Context) -> Result:
    """Time of Python and PyTorch to launch an operator: alone, and within a real training step. Then the
    process's memory on the device that PyTorch did not ask for.
    """
    import torch

    from harness.measure.cpu import cpu_name
    from harness.measure.observer import Unobserved
    from harness.recipe.recipe import Recipe
    from harness.training.loop import Kind, run_steps, set_up

    device = torch.device(context.device)
    used_before = _used_bytes() if context.device == "cuda" else None
    alone_s = host_speed(context)["operator_s"]
    tiny = {"model": "tiny-llama-bytes", "seq_len": 8}
    training, batches = set_up(Recipe(**HOST_BOUND | (tiny if context.tiny else {})), device, Unobserved())

    def steps(number: int) -> None:
        kinds: list[Kind] = ["timed"] * number
        list(run_steps(training, batches, device, kinds, Unobserved()))
        _synchronize(context)

    steps(3)
    seconds = []
    for _ in range(3 if context.tiny else STEPS):
        began = time.perf_counter()
        steps(1)
        seconds.append(time.perf_counter() - began)
    counted = OperatorCount(device.type)
    with counted.mode():
        steps(1)
    step_s = statistics.median(seconds)
    return {
        "alone_s": alone_s,
        "step_s": step_s,
        "operators": counted.operators,
        "operator_s": step_s / counted.operators,
        "processor": cpu_name(),
        **_beyond_torch(context, used_before),
    }


def cublas(context: Context) -> Result:
    """Bytes that matrix products keep allocated, one kind after the other, and then in autograd's thread."""
    import torch

    found = {}
    x = random(context, (256, 512), torch.bfloat16).requires_grad_()
    weights = {
        dtype: random(context, (512, 512), dtype).requires_grad_()
        for dtype in (torch.bfloat16, torch.float32)
    }
    bias = random(context, (512,), torch.bfloat16)
    before = torch.cuda.memory_allocated()

    def note(name: str) -> None:
        torch.cuda.synchronize()
        found[name] = torch.cuda.memory_allocated() - before

    with torch.no_grad():
        for name, product in {
            "matmul bf16": lambda: x @ weights[torch.bfloat16],
            "matmul fp32": lambda: x.float() @ weights[torch.float32],
            "addmm with bias (cublasLt)": lambda: torch.addmm(bias, x, weights[torch.bfloat16]),
            "bmm": lambda: torch.bmm(x[None], weights[torch.bfloat16][None]),
        }.items():
            product()
            note(f"forward: {name}")
    loss = (x @ weights[torch.bfloat16]).float().sum()
    torch.autograd.grad(loss, (x, weights[torch.bfloat16]))
    del loss
    note("backward: matmul bf16")
    loss = (x.float() @ weights[torch.float32]).sum()
    torch.autograd.grad(loss, (x, weights[torch.float32]))
    del loss
    note("backward: matmul fp32")
    return {"allocated_bytes": found, "workspace_bytes": max(found.values())}


def calibration_of(
    results: Iterable[Mapping[str, Any]], table_name: str, source: str, *, of_host: bool
) -> dict[str, Any]:
    """The fields of harness.hardware.Calibration that this part's `results` give for a device of the table.

    The rates of products, attention and memory are not among them, which results of earlier programmes have:
    harness/kernel_time estimates a kernel by its shape, and `harness calibrate --trace` adjusts that to a
    device. Neither are cuBLAS workspaces: PyTorch's default is what the hardware had, to the byte. `of_host`
    adds what belongs to the machine around the card: seconds that it takes for an operator, and bytes per
    second that its optimizer reaches. What was not measured is left out.
    """
    hardware = find_hardware(table_name)
    done = {result["name"]: result["result"] for result in results if result["status"] == "ok"}
    fields: dict[str, Any] = {"source": source}
    if "host-link" in done:
        rows = [row for row in done["host-link"]["rows"] if row["memory"] == "pinned"]
        fields["host_link_fraction"] = _rate(rows, "bytes") / hardware.datasheet.host_link.value
    if "launch" in done and done["launch"]["context_bytes"] is not None:
        fields["cuda_context_bytes"] = done["launch"]["context_bytes"]
    if of_host and "launch" in done:
        fields["host_op_s"] = done["launch"]["operator_s"]
    if of_host and "host-optimizer" in done:
        rows = [row for row in done["host-optimizer"]["rows"] if row["dtype"] == "bf16"]
        fields["host_memory_bandwidth"] = _rate(rows, "bytes")
    return fields


def _rate(rows: Iterable[Mapping[str, Any]], work: str) -> float:
    """Units of work a second over all rows together."""
    rows = list(rows)
    return sum(row[work] for row in rows) / sum(row["s"] for row in rows)


def _synchronize(context: Context) -> None:
    if context.device == "cuda":
        import torch

        torch.cuda.synchronize()


def _used_bytes() -> int | None:
    """Device memory in use by everyone, asked without starting CUDA here; None where NVML does not work."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
    except pynvml.NVMLError:
        return None


def _beyond_torch(context: Context, used_before: int | None) -> dict[str, Any]:
    """What NVML counts for this process, PyTorch's reserved bytes, and the difference; None where unknown.

    In a container the driver may not tell one process from another: then what the device has in use more
    than before counts, since nobody else works on it.
    """
    if context.device == "cpu":
        return {"process_bytes": None, "reserved_bytes": None, "context_bytes": None}
    import torch

    from harness.hardware.nvml import Nvml

    nvml = Nvml(str(torch.cuda.get_device_properties(0).uuid))
    process, used, reserved = nvml.process_bytes(), nvml.used_bytes(), torch.cuda.memory_reserved()
    if process is None and used is not None and used_before is not None:
        process = used - used_before
    return {
        "process_bytes": process,
        "reserved_bytes": reserved,
        "context_bytes": None if process is None else process - reserved,
        "nvml_unavailable": nvml.unavailable,
        "device_used_bytes": used,
        "device_used_before_bytes": used_before,
    }


class OperatorCount:
    """Operators that something on the device takes part in, views left out."""

    def __init__(self, device_type: str) -> None:
        self.operators = 0
        self._device_type = device_type

    def mode(self) -> Any:
        """A context in which operators are counted."""
        from torch import Tensor
        from torch.utils._python_dispatch import TorchDispatchMode

        counting = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                values = [v[0] if isinstance(v, list | tuple) and v else v for v in (out, *args)]
                first = next((v for v in values if isinstance(v, Tensor)), None)
                if not func.is_view and first is not None and first.device.type == counting._device_type:
                    counting.operators += 1
                return out

        return Mode()
