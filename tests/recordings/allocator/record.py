"""Record what PyTorch's own CUDA caching allocator does, without a GPU: recorded.json.gz.

Each TORCH is the folder `torch` of an unpacked CUDA 13 wheel: its lib/libc10_cuda.so is the allocator itself.
--cuda is the include folder of the packages nvidia-cuda-runtime and nvidia-cuda-crt. The virtual GPU's
CUDA runtime (harness/virtual_gpu/c) takes its place. Needs gcc, g++ and nm.

Run: python -m tests.recordings.allocator.record --cuda INCLUDE TORCH [TORCH ...]
"""

import argparse
import gzip
import json
import os
import random
import re
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.speed.allocator import transformer_trace

HERE = Path(__file__).parent
VIRTUAL = HERE.parents[2] / "harness" / "virtual_gpu" / "c"
RECORDED = HERE / "recorded.json.gz"
MiB = 2**20
SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:64",
    "max_split_size_mb:20,max_non_split_rounding_mb:100",
    "expandable_segments:True,max_split_size_mb:32",
    "large_segment_size_mb:12",
    "large_segment_size_mb:64,expandable_segments:True",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:8,16:2,>:4],expandable_segments:True",
    "per_process_memory_fraction:0.5",
    "per_process_memory_fraction:0.5,garbage_collection_threshold:0.6",
    "per_process_memory_fraction:0.8,garbage_collection_threshold:0.3,max_split_size_mb:64",
    "per_process_memory_fraction:0.5,expandable_segments:True",
)


def random_operations(rng: random.Random, count: int, streams: list[int], largest: int) -> list[list[Any]]:
    """Mallocs, of sizes that come back and of others, frees in any order, and now and then the rest."""
    operations: list[list[Any]] = []
    live: list[int] = []
    mallocs = 0
    favourites = [rng.randint(1, min(2 ** rng.randint(9, 27), largest)) for _ in range(6)]
    for _ in range(count):
        chance = rng.random()
        if chance < 0.04:
            operations.append([rng.choice("epsn")])
        elif live and (chance < 0.5 or len(live) > 25):
            operations.append(["f", live.pop(rng.randrange(len(live)))])
        else:
            any_size = min(rng.randint(1, 2 ** rng.randint(4, 28)), largest)
            size = rng.choice(favourites) if rng.random() < 0.6 else any_size
            operations.append(["m", size, rng.choice(streams)])
            live.append(mallocs)
            mallocs += 1
    return [*operations, ["s"], ["n"], *(["f", number] for number in live), ["e"], ["s"], ["n"]]


def cases() -> list[dict[str, Any]]:
    """What to do, in which settings and on which device."""
    made = []
    for number, settings in enumerate(SETTINGS * 2):
        rng = random.Random(number)
        # Twice: memory runs out, or never does. Requests stay below the device's memory, as real ones do.
        capacity = 300 * MiB if number < len(SETTINGS) else 4000 * MiB
        up = "expandable" in settings or number % 3 == 0
        made.append(
            {
                "settings": settings,
                "capacity_bytes": capacity,
                "device_bytes": capacity + 64 * MiB,
                "addresses": "up" if up else f"random{number}",
                "operations": random_operations(rng, 220, [0, 5, 9] if number % 2 else [0], 200 * MiB),
            }
        )
    training = [
        ["m", event, 0] if event > 0 else ["f", -event - 1]
        for event in transformer_trace(900, layers=2, tokens=333)
    ]
    for settings in SETTINGS[:2]:
        made.append(
            {
                "settings": settings,
                "capacity_bytes": 80_000 * MiB,
                "device_bytes": 80_000 * MiB,
                "addresses": "up",
                "operations": [*training, ["s"], ["n"], ["e"], ["s"], ["n"]],
            }
        )
    return made


def build(torch: Path, cuda: Path, folder: Path) -> Path:
    """Compile the virtual GPU and the driver for one torch."""

    def run(command: str) -> str:
        return subprocess.run(shlex.split(command), capture_output=True, text=True, check=True).stdout

    # What the library wants and the allocator never calls only has to exist.
    sources = [VIRTUAL / name for name in ("memory.c", "processes.c", "runtime.c", "crash.c")]
    source = "\n".join(path.read_text() for path in sources)
    wanted = set(re.findall(r" (cuda\w+)", run(f"nm -D --undefined-only {torch}/lib/libc10_cuda.so")))
    abort = 'fputs("the virtual GPU lacks %s\\n", stderr); abort();'
    unused = [f"void {name}(void) {{ {abort % name} }}" for name in wanted if f" {name}(" not in source]
    (folder / "unused.c").write_text("\n".join(["#include <stdio.h>", "#include <stdlib.h>", *unused]))
    (folder / "versions").write_text("libcudart.so.13 { global: *; };")
    library = folder / "libcudart.so.13"
    run(
        f"gcc -O1 -w -shared -fPIC -pthread -I{cuda} {' '.join(map(str, sources))} {folder}/unused.c "
        f"-o {library} "
        f"-Wl,-soname,libcudart.so.13 -Wl,--version-script={folder}/versions"
    )
    run(
        f"g++ -std=c++20 -O1 -w -DC10_CUDA_NO_CMAKE_CONFIGURE_FILE -I{torch}/include -I{cuda} "
        f"{HERE}/driver.cpp -o {folder}/driver -L{torch}/lib -lc10 -lc10_cuda {library} "
        f"-Wl,-rpath,{torch}/lib -Wl,--allow-shlib-undefined"
    )
    return folder / "driver"


def record(driver: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Trace, statistics and segments of one case."""
    surroundings = {
        "LD_LIBRARY_PATH": str(driver.parent),
        "PYTORCH_CUDA_ALLOC_CONF": case["settings"],
        "VIRTUAL_GPU_CAPACITY": str(case["capacity_bytes"]),
        "VIRTUAL_GPU_TOTAL": str(case["device_bytes"]),
        "VIRTUAL_GPU_ADDRESSES": case["addresses"],
        "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    text = "\n".join(" ".join(map(str, operation)) for operation in case["operations"])
    run = subprocess.run(
        [driver], input=text, env=os.environ | surroundings, capture_output=True, text=True, check=True
    )
    trace: list[Any] = []
    stats: list[dict[str, Any]] = []
    segments: list[list[list[Any]]] = []
    for line in run.stdout.splitlines():
        kind, *words = line.split()
        if kind == "T":
            trace.append([words[0], *map(int, words[1:])])
            if words[0] == "snapshot":
                segments.append([])
        elif kind == "S":
            if words[0] == "allocation.all":
                stats.append({})
            stats[-1][words[0]] = list(map(int, words[1:]))
        elif kind == "C":
            stats[-1]["counts"] = list(map(int, words))
        elif kind in "GB":
            segments[-1].append([kind, *map(int, words)])
    return {"trace": trace, "stats": stats, "segments": segments}


def main() -> None:
    """Record every case with every torch; versions that do the same share a recording."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", type=Path, required=True)
    parser.add_argument("torch", type=Path, nargs="+")
    arguments = parser.parse_args()
    recorded = [{**case, "recordings": []} for case in cases()]
    for torch in arguments.torch:
        version = re.search(r"__version__ = '(.*)'", (torch / "version.py").read_text())
        assert version, torch
        with tempfile.TemporaryDirectory() as folder:
            driver = build(torch.resolve(), arguments.cuda.resolve(), Path(folder))
            for case in recorded:
                result = record(driver, case)
                same = [each for each in case["recordings"] if {**each, "torch": 0} == {**result, "torch": 0}]
                if same:
                    same[0]["torch"].append(version[1])
                else:
                    case["recordings"].append({"torch": [version[1]], **result})
    text = json.dumps(recorded, separators=(",", ":"))
    RECORDED.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{len(recorded)} cases, {sum(len(case['recordings']) for case in recorded)} recordings")


if __name__ == "__main__":
    main()
