"""`compile: true` on a virtual GPU: peaks and device time of four layers of three models, eager and compiled.

    python -m benchmarks.virtual_gpu.compiled [MODEL ...] [--gpu NAME] [--out FILE]

Takes PyTorch's CUDA build and no GPU. Inductor and Triton compile their kernels, into caches of the run's
own. Each run is `harness run llama-3.2-1b-bf16 --gpu NAME` with the model changed: every weight is trained.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.command import GrowingTable, parser_of, versions_of
from harness.errors import InputError
from harness.step_profile import StepProfile
from harness.system import PACKAGE

MODELS = PACKAGE.parent / "recipes" / "models"
NAMES = ("llama-3.2-1b", "qwen3-8b", "gemma-2-2b")
LAYERS = 4
RECIPE = "llama-3.2-1b-bf16"
NEEDS = {"gemma-2-2b": ["attention=eager"]}
"""It caps its attention scores, which no other attention does."""
STEPS = ("steps=2", "warmup_steps=1")
LIBRARIES = ("torch", "triton", "transformers")


def row(model: str, gpu: str) -> dict[str, Any]:
    """Both ways with one model."""
    config = json.loads((MODELS / f"{model}.json").read_bytes()) | {"num_hidden_layers": LAYERS}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:LAYERS]
    found: dict[str, Any] = {"model": model, "layers": LAYERS, "gpu": gpu}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / f"{model}.json").write_text(json.dumps(config))
        for name, compile_it in (("eager", False), ("compiled", True)):
            found[name] = run(folder / f"{model}.json", gpu, compile_it, folder / name)
    return found


def run(model: Path, gpu: str, compile_it: bool, folder: Path) -> dict[str, Any]:
    """Peaks in bytes; seconds that the device is at work in a step; how many kernels Triton compiled; seconds
    of processors."""
    caches, times = folder / "caches", folder / "times"
    times.mkdir(parents=True)
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(caches), "TRITON_CACHE_DIR": str(caches)}
    environment["VIRTUAL_GPU_TIMES"] = str(times)
    changes = [f"model={model}", f"compile={str(compile_it).lower()}", *NEEDS.get(model.stem, []), *STEPS]
    command = [sys.executable, "-m", "harness", "run", RECIPE, "--gpu", gpu, "--out", str(folder / "run")]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*command, *changes], env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise InputError(f"{' '.join(changes)}: status {done.returncode}\n{done.stderr[-4000:]}")
    memory = StepProfile.read(folder / "run" / "profile.json").memory
    (told,) = (json.loads(path.read_text(encoding="utf-8")) for path in times.glob("*-times.json"))
    return {
        "peak_allocated_bytes": memory.peak_allocated_bytes,
        "peak_reserved_bytes": memory.peak_reserved_bytes,
        "first_step_peak_allocated_bytes": memory.first_step_peak_allocated_bytes,
        "busy_s": told["busy_s"],
        "unknown_kernels": told["unknown"],
        "kernels": len(list(caches.rglob("*.cubin"))),
        "processor_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
    }


def main() -> int:
    parser = parser_of("benchmarks.virtual_gpu.compiled", __doc__)
    parser.add_argument("model", nargs="*", help=f"names in recipes/models; default: {', '.join(NAMES)}")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--out", type=Path, help="a JSON file; its rows of these versions are kept")
    options = parser.parse_args()
    head = {"versions": versions_of(LIBRARIES), "recipe": RECIPE, "changed": STEPS, "needs": NEEDS}
    table = GrowingTable(options.out, head, lambda each: each["model"])
    for model in options.model or NAMES:
        table.add(found := row(model, options.gpu))
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
