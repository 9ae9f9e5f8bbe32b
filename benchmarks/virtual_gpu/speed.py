"""What the virtual GPU costs: the start of a process against the CPU, a step of a large recipe, a large
checkpoint.

    python -m benchmarks.virtual_gpu.speed [--out FILE]

Seconds of processors, of a process and all that it starts: other work on the machine has little say in them.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.system import write_whole

START = "import torch; torch.ones(1, device='{}').sum().item()"
RSS = "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024"
STEP = f"""
import json, resource, time, torch
from harness.measure.observer import Unobserved
from harness.training import run_steps, set_up
from harness.recipe import load_recipe
_, recipe = load_recipe("llama-3.1-8b-lora", [])
device = torch.device("cuda")
training, batches = set_up(recipe, device, Unobserved())
seconds, before = [], {RSS}
for kind in ("warmup", "warmup", "warmup"):
    began = time.process_time()
    list(run_steps(training, batches, device, [kind], Unobserved()))
    seconds.append(time.process_time() - began)
print(json.dumps({{"step_processor_s": round(min(seconds[1:]), 2), "host_rss_after_setup_bytes": before,
                  "host_rss_bytes": {RSS}}}))
"""
LIBRARIES = f"""
import resource, torch
from harness.measure.observer import Unobserved
from harness.training import run_steps, set_up
from harness.recipe import load_recipe
_, recipe = load_recipe("llama-3.1-8b-lora", ["model=recipes/models/tiny-llama-bytes.json", "seq_len=64"])
device = torch.device("cpu")
training, batches = set_up(recipe, device, Unobserved())
list(run_steps(training, batches, device, ["warmup"], Unobserved()))
print({RSS})
"""
"""The same program with a tiny model on the CPU: what its libraries take."""
LOAD = f"""
import json, resource, sys, time, torch
from transformers import AutoModelForCausalLM
torch.ones(1, device="cuda")
before, began = {RSS}, time.process_time()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, device_map="cuda")
print(json.dumps({{"processor_s": round(time.process_time() - began, 2), "host_rss_before_bytes": before,
                  "host_rss_bytes": {RSS}, "allocated_bytes": torch.cuda.memory_allocated()}}))
"""
EMPTY = """
import json, sys, torch
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM
folder = Path(sys.argv[2])
config = AutoConfig.from_pretrained(sys.argv[1])
config.save_pretrained(folder)
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
header, end = {"__metadata__": {"format": "pt"}}, 0
for name, weight in model.state_dict().items():
    begin, end = end, end + weight.nbytes
    header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [begin, end]}
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
with open(folder / "model.safetensors", "wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    file.truncate(8 + len(text) + end)
"""
"""A checkpoint of zeros, which takes no place on a disk: config.json, and one file of the whole size."""


def processor_s(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def last_line(command: list[str]) -> Any:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.virtual_gpu.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    emulate = [sys.executable, "-m", "harness", "emulate", "--gpu", "h100", "--"]
    here = [sys.executable, "-c"]
    on_cpu, on_virtual = [*here, START.format("cpu")], [*emulate, *here, START.format("cuda")]
    processor_s(on_virtual)  # compiles what is not in the cache
    pairs = [(processor_s(on_cpu), processor_s(on_virtual)) for _ in range(options.runs)]
    cpu_s, virtual_s = (statistics.median(each) for each in zip(*pairs, strict=True))
    found: dict[str, Any] = {
        "processors": os.cpu_count(),
        "start": {"on_cpu_processor_s": round(cpu_s, 2), "on_virtual_gpu_processor_s": round(virtual_s, 2)},
        "llama-3.1-8b-lora": last_line([*emulate, *here, STEP]),
    }
    found["llama-3.1-8b-lora"]["host_rss_of_libraries_bytes"] = last_line([*here, LIBRARIES])
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*here, EMPTY, "recipes/models/llama-3.1-8b.json", folder], check=True)
        found["from_pretrained of 16 GB"] = last_line([*emulate, *here, LOAD, folder])
    text = json.dumps(found, indent=1) + "\n"
    if options.out is not None:
        write_whole(options.out, text)
    print(text, end="")


if __name__ == "__main__":
    main()
