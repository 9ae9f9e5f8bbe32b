"""Finds out what this machine can do: its devices and packages, and every toggle of a recipe by trying it."""

import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import psutil
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.errors import HarnessError
from harness.hardware import TABLE_NAMES, Nvml
from harness.measure.observer import Unobserved
from harness.recipe import OF_RANKS, Recipe, fields_that_change, find_model_config
from harness.system import PACKAGES, installed_version
from harness.training import run_steps, set_up
from harness.virtual_gpu import why_not

COMPILE_LIMIT_S = 120
TINY: dict[str, Any] = {"model": "tiny-llama-bytes", "precision": "fp32", "seq_len": 16}
"""The recipe that every toggle is tried on: one step of one block of this model."""
_QLORA = {"quantization": "nf4", "adapter": "lora", "precision": "bf16"}
NEEDS: dict[str, dict[str, Any]] = {
    "quantization": {"adapter": "lora", "precision": "bf16"},
    "double_quant": _QLORA,
    "upcast_for_kbit": _QLORA,
    "master_weights": {"precision": "bf16"},
    "adapter_dtype": {"adapter": "lora", "precision": "bf16"},
    "fp8": {"precision": "bf16"},
    "selective_checkpointing": {"gradient_checkpointing": True},
    "checkpoints": {"gradient_checkpointing": True},
    "use_rslora": {"adapter": "lora"},
    "dpo_reference": {"task": "dpo"},
    "num_labels": {"task": "classification"},
    "use_dora": {"adapter": "lora"},
    "peft": {"peft": {"peft_type": "VERA"}},
    "flash_attention_2": {"precision": "bf16"},
    "flash_attention_3": {"precision": "bf16"},
    "flash_attention_4": {"precision": "bf16"},
    "flex_attention": {"seq_len": 128},
}
"""The other fields that a recipe needs so that a field, or one value of it, is possible at all."""


def examine(trying: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
    """Everything that can be found out, as plain data for JSON.

    machine, gpus and packages are facts; `toggles` and `checks` are lists of {name, works, reason, seconds},
    where `reason` says why not (None when it works). It takes some seconds, or as long as one torch.compile
    takes at its first use. `trying` is called with the name of what is tried next.
    """
    compiling = _start_compiling()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    toggles = _try_toggles(device, trying)
    checks = []
    for name, check in _checks(device):
        trying(name)
        checks.append(_tried(name, check))
    trying("compile: true")
    toggles.append(_tried("compile: true", lambda: _finish_compiling(compiling)))
    return {
        "machine": {
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "cuda_build": torch.version.cuda,
            "no_gpu_because": _no_gpu_because(),
            "no_virtual_gpu_because": why_not(),
        },
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "packages": {name: installed_version(name) for name in PACKAGES},
        "toggles": toggles,
        "checks": checks,
    }


def toggle_recipes() -> Iterator[tuple[str, dict[str, Any]]]:
    """("field: value", recipe fields) for every value of every switch and choice that one process can have,
    except compile: true and what only a model with vision has."""
    for name, field in Recipe.model_fields.items():
        if name in (*fields_that_change("source"), *OF_RANKS, "compile", "train_vision"):
            continue
        for value in _values(field.annotation):
            shown = {True: "true"}.get(value, value)
            given = (value,) if name == "offload" else value
            yield f"{name}: {shown}", TINY | NEEDS.get(name, {}) | NEEDS.get(str(value), {}) | {name: given}


def _values(annotation: Any) -> list[Any]:
    """The values of a field to try: True of a switch, every choice of a Literal or of a tuple of Literals."""
    if annotation is bool:
        return [True]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) is tuple:
        return _values(get_args(annotation)[0])
    return []


def _tried(name: str, attempt: Callable[[], object]) -> dict[str, Any]:
    """An entry of `toggles` or `checks` (see `examine`), from calling `attempt`."""
    began = time.perf_counter()
    reason = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*[Ff]alling back")  # to something else than was tried
            attempt()
    except HarnessError as error:
        reason = str(error)
    except Exception as error:  # whatever the libraries raise here is the finding
        first_line = (str(error).strip().splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {first_line}"
    seconds = round(time.perf_counter() - began, 3)
    return {"name": name, "works": reason is None, "reason": reason, "seconds": seconds}


def _try_toggles(device: torch.device, trying: Callable[[str], None]) -> list[dict[str, Any]]:
    """One step for each distinct recipe; several names can stand for the same recipe, such as the default."""
    named = find_model_config(TINY["model"])
    assert named is not None
    config = json.loads(named.read_bytes()) | {"num_hidden_layers": 1}
    found: dict[Recipe, dict[str, Any]] = {}
    toggles = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(config))
        for name, fields in toggle_recipes():
            recipe = Recipe.model_validate(fields | {"model": str(path)})
            if recipe not in found:
                trying(name)
                found[recipe] = _tried(name, lambda r=recipe: _one_step(r, device))
            toggles.append(found[recipe] | {"name": name})
    return toggles


def _one_step(recipe: Recipe, device: torch.device) -> None:
    """One training step of the harness itself."""
    training, batches = set_up(recipe, device, Unobserved())
    (step,) = run_steps(training, batches, device, ["warmup"], Unobserved())
    if not math.isfinite(float(step.loss)):
        raise ArithmeticError(f"the loss of the first step is {float(step.loss)}")


def _checks(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, check) of what is not a field of a recipe, or is torch's own choice within one."""
    yield "matrix product: bf16", lambda: _product(device, torch.bfloat16)
    yield "matrix product: fp16", lambda: _product(device, torch.float16)
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
    for name, backend in backends.items():
        yield f"sdpa kernel: {name}", lambda b=backend: _attend(device, b)
    yield "host memory: pinned", lambda: torch.empty(1, pin_memory=True)
    yield "memory history: CUDA", _record_history


def _product(device: torch.device, dtype: torch.dtype) -> None:
    square = torch.ones(64, 64, device=device, dtype=dtype)
    if float((square @ square)[0, 0]) != 64:
        raise ArithmeticError("a matrix product of ones is wrong")


def _attend(device: torch.device, backend: SDPBackend) -> None:
    query = torch.ones(1, 2, 64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    with sdpa_kernel(backend):
        out = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        torch.autograd.grad(out.sum(), query)


def _record_history() -> None:
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=100, stacks="python")
    try:
        held = torch.empty(1, device="cuda")
        recorded: Any = torch.cuda.memory._snapshot()
        if not any(recorded["device_traces"]):
            raise RuntimeError("the allocator recorded nothing")
        del held
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _start_compiling() -> subprocess.Popen[str]:
    """Compile a small function in a process of its own, while everything else is tried."""
    code = (
        "import torch\n"
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "x = torch.ones(8, device=device, requires_grad=True)\n"
        "torch.autograd.grad(torch.compile(lambda x: (x.sin() + 1).sum())(x), x)\n"
    )
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, **quiet)


def _finish_compiling(process: subprocess.Popen[str]) -> None:
    try:
        _, stderr = process.communicate(timeout=COMPILE_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise TimeoutError(f"torch.compile took more than {COMPILE_LIMIT_S} s on a small function") from None
    if process.returncode != 0:
        lines = [line for line in stderr.splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else f"exit status {process.returncode}")


def _no_gpu_because() -> str | None:
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"this PyTorch ({torch.__version__}) is built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return "CUDA starts, but shows no device"


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return {
        "name": properties.name,
        "in_hardware_table": TABLE_NAMES.get(properties.name),
        "memory_bytes": total,
        "free_bytes": free,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver": Nvml(str(properties.uuid)).driver(),
    }
