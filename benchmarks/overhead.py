"""What the harness costs: the median of its step over the median of a bare loop's, with the same parts.

Both train their own copy of the same model. Their steps alternate in one process, and which goes first
alternates too, so that whatever slows the machine down meets both. A step's time is the clock's, data and
the wait for the device included. Bar: a ratio of 1.02 or less.

    python -m benchmarks.overhead [RECIPE] [key=value ...] [--rounds N] [--out FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.device_observer import DeviceObserver, Unobserved
from harness.files import write_whole
from harness.loop import Kind, run_steps, set_up
from harness.measure import chosen_device
from harness.measure_cpu import CpuObserver
from harness.measure_cuda import CudaObserver
from harness.provenance import provenance
from harness.recipe import Recipe
from harness.recipe_file import load_recipe

WARMUP_ROUNDS = 5
RESAMPLES = 2000


def compare(recipe: Recipe, device: torch.device, rounds: int) -> dict[str, Any]:
    """Time `rounds` pairs of steps. JSON-able: medians in seconds, their ratio, and its 95 % interval.

    The interval is that of a bootstrap over the pairs.
    """
    loops = {"harness": harness_loop(recipe, device, rounds), "bare": bare_loop(recipe, device)}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    gc.collect()
    for turn in range(WARMUP_ROUNDS + rounds):
        for name in list(loops) if turn % 2 else reversed(loops):
            began = time.perf_counter()
            next(loops[name])
            if turn >= WARMUP_ROUNDS:
                seconds[name].append(time.perf_counter() - began)
    harness, bare = (np.array(seconds[name]) for name in ("harness", "bare"))
    drawn = np.random.default_rng(0).integers(0, rounds, (RESAMPLES, rounds))
    ratios = np.median(harness[drawn], axis=1) / np.median(bare[drawn], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return {
        "ratio": float(np.median(harness) / np.median(bare)),
        "ratio_low": float(low),
        "ratio_high": float(high),
        "harness_median_s": float(np.median(harness)),
        "bare_median_s": float(np.median(bare)),
        "rounds": rounds,
    }


def harness_loop(recipe: Recipe, device: torch.device, rounds: int) -> Iterator[Tensor]:
    """The harness's steps as `harness run` takes its timed ones: its loop, its observer, no recording."""
    observer: DeviceObserver
    observer = CudaObserver(device, with_history=False) if device.type == "cuda" else CpuObserver()
    training, batches = set_up(recipe, device, observer)
    observer.trained(training)
    kinds: list[Kind] = ["timed"] * (WARMUP_ROUNDS + rounds)
    for step in run_steps(training, batches, device, kinds, observer):
        observer.end_step()
        yield step.loss


def bare_loop(recipe: Recipe, device: torch.device) -> Iterator[Tensor]:
    """What one would write by hand."""
    training, batches = set_up(recipe, device, Unobserved())
    model, scaler = training.model, training.scaler
    optimizer: Any = training.optimizer
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for micro_batches, num_tokens in batches:
        total = torch.zeros((), device=device)
        for on_host in micro_batches:
            batch = {name: value.to(device, non_blocking=True) for name, value in on_host.items()}
            with training.autocast(), training.saved_tensors():
                loss = model(**batch, num_items_in_batch=num_tokens).loss
            (scaler.scale(loss) if scaler else loss).backward()
            total += loss.detach()
        with training.stepping():
            if hasattr(optimizer, "take_gradients"):  # master weights, or the optimizer on the host
                optimizer.take_gradients()
            if recipe.max_grad_norm is not None:
                if scaler:
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(trained, recipe.max_grad_norm)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        wait()
        yield total


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="smoke")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path, help="write the numbers here, as JSON")
    given = parser.parse_args()
    name, recipe = load_recipe(given.recipe, given.overrides)
    device = chosen_device()
    found = compare(recipe, device, given.rounds)
    harness_ms, bare_ms = found["harness_median_s"] * 1e3, found["bare_median_s"] * 1e3
    print(
        f"{name} on {device}, {given.rounds} pairs of steps: harness {harness_ms:.2f} ms, bare loop "
        f"{bare_ms:.2f} ms, ratio {found['ratio']:.4f} "
        f"(95 % {found['ratio_low']:.4f} to {found['ratio_high']:.4f}; bar 1.02)"
    )
    if given.out:
        document = {"benchmark": "overhead", "recipe": name, **found, "provenance": provenance()}
        write_whole(given.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
