"""The pieces of the hardware programme, each in a process of its own, so that none can harm the next.

A fresh process has a fresh CUDA context and allocator, and a crash or a hang ends with it. Forking one
that has imported the libraries, but not touched the GPU, spares every piece the seconds those imports
take; where a fork cannot use the GPU, every piece starts a new interpreter instead.
"""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from harness.errors import HarnessError
from harness.recipe.recipe import Recipe

StartMethod = Literal["fork", "spawn"]
Result = dict[str, Any]
"""What a piece returns: plain data, as JSON has it."""

PIECE_LIMIT_S = 180.0
GRACE_S = 50.0
"""How much longer than a part's time its last piece may run."""
PACKAGES = {
    "bitsandbytes": "bitsandbytes",
    "peft": "peft",
    "liger_kernel": "liger-kernel",
    "flash_attn": "flash-attn",
    "flash_attn_interface": "flash-attn-3",
    "trl": "trl",
    "datasets": "datasets",
}
"""Optional modules, and what to install for them."""
LIGER_IS_TRITON = "Liger's loss is a Triton kernel"


@dataclass(frozen=True)
class Context:
    """Where the programme runs. Tiny: the same code with small models, on the CPU."""

    device: Literal["cuda", "cpu"]
    tiny: bool
    out: Path


@dataclass(frozen=True)
class Piece:
    """One thing to do: `run(context, **arguments)`, with a function that a new process can import."""

    name: str
    run: Callable[..., Result]
    arguments: dict[str, Any] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    """Optional modules it needs, from PACKAGES."""
    gpu_only: str | None = None
    """Why it cannot run on a CPU."""
    environment: dict[str, str] = field(default_factory=dict)
    """Set before the process touches the GPU."""
    new_interpreter: bool = False
    """Do not fork: libraries may read the environment as they are imported."""
    limit_s: float = PIECE_LIMIT_S


def modules_of(recipe: Recipe) -> tuple[str, ...]:
    """The optional modules that `recipe` needs."""
    needed = {
        "peft": recipe.adapter != "none",
        "bitsandbytes": recipe.quantized or recipe.by_bitsandbytes,
        "liger_kernel": recipe.loss == "fused_linear",
        "flash_attn": recipe.attention == "flash_attention_2",
        "flash_attn_interface": recipe.attention == "flash_attention_3",
    }
    return tuple(module for module, is_needed in needed.items() if is_needed)


def reason_to_skip(piece: Piece, context: Context) -> str | None:
    """Why `piece` cannot run here, in words; None if it can."""
    if piece.gpu_only and context.device == "cpu":
        return f"needs an NVIDIA GPU: {piece.gpu_only}"
    missing = [PACKAGES[module] for module in piece.modules if not is_installed(module)]
    return f"needs {' and '.join(missing)}, not installed here" if missing else None


def is_installed(module: str) -> bool:
    """Whether `module` can be imported, without importing it."""
    return find_spec(module) is not None


def prepare_process(device: str) -> None:
    """Settings that every process of the programme has; call it before torch is imported."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("BITSANDBYTES_NOWELCOME", "1")
    os.environ["USE_HUB_KERNELS"] = "NO"
    # Asking whether there is a GPU must not start CUDA: a process that did cannot be forked.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # small tensors: a second thread costs more than it brings
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def import_libraries(context: Context) -> None:
    """Import what the pieces will import, leaving the GPU alone: one that was used cannot be forked.

    bitsandbytes (and peft, which imports it) asks for the GPU's capability. NVML answers that here.
    """
    import accelerate  # noqa: F401
    import transformers.modeling_utils
    import transformers.models.llama.modeling_llama  # noqa: F401

    import harness.measure.measured_run
    import harness.training.model  # noqa: F401

    with nullcontext() if context.device == "cpu" else patch("torch.cuda.get_device_capability", _capability):
        import peft  # noqa: F401


def _capability(device: Any = None) -> tuple[int, int]:
    """The compute capability of the first GPU, by NVML: major and minor."""
    import pynvml

    pynvml.nvmlInit()
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0))
    return major, minor


def run_pieces(
    pieces: Sequence[Piece], context: Context, start: StartMethod, *, workers: int = 1, until_s: float
) -> Iterator[Result]:
    """Run the pieces, at most `workers` at a time, and yield each result as it is there.

    `until_s` is a time.monotonic(): no piece starts after it, and what runs GRACE_S longer is ended.
    A result has name, status (ok, oom, skipped, error, died, timeout, not run), seconds, and then reason or
    traceback, or the piece's own result.
    """
    waiting, running = list(pieces), dict[str, _Running]()
    while waiting or running:
        while waiting and len(running) < workers:
            piece = waiting.pop(0)
            reason = reason_to_skip(piece, context)
            if reason is not None:
                yield {"name": piece.name, "status": "skipped", "reason": reason}
            elif time.monotonic() >= until_s:
                yield {"name": piece.name, "status": "not run", "reason": "this part's time was used up"}
            else:
                running[piece.name] = _Running(piece, context, start, until_s + GRACE_S)
        for name, one in list(running.items()):
            if one.ended():
                del running[name]
                yield one.result()
        time.sleep(0.01)


class _Running:
    """A piece in its own process, and the file that its result will be in."""

    def __init__(self, piece: Piece, context: Context, start: StartMethod, latest_s: float) -> None:
        self.piece = piece
        self.folder = tempfile.TemporaryDirectory(prefix="piece-")
        self.started_s = time.monotonic()
        self.deadline_s = min(self.started_s + piece.limit_s, latest_s)
        processes: Any = multiprocessing.get_context("spawn" if piece.new_interpreter else start)
        self.process = processes.Process(target=_in_child, args=(piece, context, self.folder.name))
        sys.stdout.flush()
        self.process.start()

    def ended(self) -> bool:
        """Whether the process is gone, or must go now."""
        return not self.process.is_alive() or time.monotonic() >= self.deadline_s

    def result(self) -> Result:
        """What the process left, or how it ended."""
        late = self.process.is_alive()
        if late:
            self.process.kill()
        self.process.join()
        path = Path(self.folder.name) / "result.json"
        seconds = round(time.monotonic() - self.started_s, 2)
        head = {"name": self.piece.name, "status": "ok", "seconds": seconds}
        if path.exists():
            head |= json.loads(path.read_bytes())
        elif late:
            head |= {"status": "timeout", "reason": f"ended after {seconds:.0f} s"}
        else:
            head |= {"status": "died", "reason": _exit_in_words(self.process.exitcode)}
        self.folder.cleanup()
        return head


def _in_child(piece: Piece, context: Context, folder: str) -> None:
    os.environ.update(piece.environment)
    prepare_process(context.device)
    warnings.filterwarnings("ignore", module=r"bitsandbytes|transformers|peft|torch")
    os.environ["TMPDIR"] = tempfile.tempdir = folder  # what the piece leaves behind goes with the process
    try:
        made = piece.run(context, **piece.arguments)
        status = made.pop("status", "ok")
        outcome = json.dumps({"status": status, "result": made}, allow_nan=False)
    except Exception as error:
        kind = type(error).__name__
        first = (str(error).strip().splitlines() or [""])[0]
        reason = str(error) if isinstance(error, HarnessError) else f"{kind}: {first}"
        status = "oom" if kind == "OutOfMemoryError" else "error"
        outcome = json.dumps({"status": status, "reason": reason, "traceback": traceback.format_exc()})
    partial = Path(folder) / "result.partial"
    partial.write_text(outcome)
    partial.rename(Path(folder) / "result.json")


def _exit_in_words(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    return f"the process ended with status {code} and no result"
