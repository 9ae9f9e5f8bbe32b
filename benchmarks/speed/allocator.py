"""Events a second of the allocator model, on one core. An event is a malloc or a free.

Run: python -m benchmarks.speed.allocator [events]. Prints the best of three runs, in CPU time.
"""

import random
import sys
import time

from harness.allocator.allocator import Allocator
from harness.allocator.blocks import Block
from harness.allocator.settings import parse_settings

CONFIGURATIONS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:128",
    "roundup_power2_divisions:4",
    "per_process_memory_fraction:0.9,garbage_collection_threshold:0.8",
)


def transformer_trace(events: int, layers: int = 32, hidden: int = 4096, tokens: int = 2048) -> list[int]:
    """Full fine-tuning in bf16, step after step. n > 0 asks for n bytes, -i frees the i-th request."""
    trace: list[int] = []
    mallocs = 0

    def malloc(size_bytes: int) -> int:
        nonlocal mallocs
        trace.append(size_bytes)
        mallocs += 1
        return mallocs

    def free(number: int) -> None:
        trace.append(-number)

    activation = tokens * hidden * 2
    weights = [hidden * hidden * 2] * 4 + [hidden * 11008 * 2] * 3 + [hidden * 2] * 2
    for _ in range(layers):
        for size in weights:
            for _ in range(3):  # the weight and its two moments
                malloc(size)
    while len(trace) < events:
        saved: list[list[int]] = []
        for _ in range(layers):
            kept = []
            for multiple in (1, 1, 1, 1, 3, 3, 3, 1):  # in units of tokens x hidden
                kept.append(malloc(activation * multiple))
                temporaries = [malloc(activation * 2), malloc(tokens * 4), malloc(512)]
                for number in temporaries:
                    free(number)
            saved.append(kept)
        gradients = []
        for kept in reversed(saved):
            flowing = malloc(activation)
            for number, weight in zip(reversed(kept), weights, strict=False):
                gradients.append(malloc(weight))
                following = malloc(activation)
                free(flowing)
                free(number)
                flowing = following
            free(flowing)
        for number in gradients:
            for temporary in [malloc(weights[0]), malloc(weights[0])]:
                free(temporary)
            free(number)
    return trace


def random_trace(events: int, live: int = 300) -> list[int]:
    """Sizes from 16 bytes to 64 MiB, evenly on a log scale; a random one of about `live` blocks is freed."""
    rng = random.Random(0)
    trace: list[int] = []
    alive: list[int] = []
    mallocs = 0
    while len(trace) < events:
        if len(alive) > live or (alive and rng.random() < 0.45):
            trace.append(-alive.pop(rng.randrange(len(alive))))
        else:
            trace.append(int(2 ** rng.uniform(4, 26)))
            mallocs += 1
            alive.append(mallocs)
    return trace


def seconds(trace: list[int], text: str) -> float:
    """CPU time of one run of the trace through a new allocator."""
    allocator = Allocator(parse_settings(text), capacity_bytes=2**42)
    malloc, free = allocator.malloc, allocator.free
    blocks: list[Block | None] = [None]
    start = time.process_time()
    for event in trace:
        if event > 0:
            blocks.append(malloc(event))
        else:
            free(blocks[-event])  # type: ignore[arg-type]
    return time.process_time() - start


def main() -> None:
    """Print one row for each trace and configuration."""
    events = int(sys.argv[1]) if len(sys.argv) > 1 else 300_000
    print(f"{'trace':12} {'PYTORCH_CUDA_ALLOC_CONF':66} {'events/s':>10}")
    for name, make in (("transformer", transformer_trace), ("random", random_trace)):
        trace = make(events)
        for text in CONFIGURATIONS:
            best = min(seconds(trace, text) for _ in range(3))
            print(f"{name:12} {text or '(default)':66} {len(trace) / best:10,.0f}")


if __name__ == "__main__":
    main()
