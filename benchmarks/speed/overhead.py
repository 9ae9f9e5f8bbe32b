"""What the harness costs: its step's time over that of a bare loop's step, with the same parts.

Both train their own copy of the same model. Their steps take turns in one process, and which goes first
alternates, so that whatever slows the machine down meets both. Two pairs of steps, one in each order, give
one ratio; the result is the median of those, with its 95 % interval from a bootstrap over them. A step's
time is the clock's, data and the wait for the device included. On a CPU one thread computes, since two
that wait for each other spread more than what is measured. Bar: 1.02 or less.

    python -m benchmarks.speed.overhead [RECIPE] [key=value ...] [--rounds N] [--out FILE]
"""

import gc
import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.command import parser_of
from harness.measure.cpu import CpuObserver
from harness.measure.cuda import CudaObserver
from harness.measure.measured_run import chosen_device
from harness.measure.observer import DeviceObserver, Unobserved
from harness.recipe.file import load_recipe
from harness.recipe.recipe import Recipe
from harness.system.files import write_whole
from harness.system.versions import provenance
from harness.training.loop import Kind, run_steps, set_up

BAR = 1.02
WARMUP_ROUNDS = 6
ROUNDS = 400
SHORT = ("micro_batch_size=2", "seq_len=128")
"""smoke with a quarter of its tokens: more pairs in a minute, and the harness is a larger part of each."""
RESAMPLES = 2000
Loop = Callable[[Recipe, torch.device, int], Iterator[Tensor]]


def compare(
    recipe: Recipe,
    device: torch.device,
    rounds: int,
    ours: Loop | None = None,
    before: Callable[[str], None] = lambda name: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Time `rounds` (even) pairs of steps of `ours` (default: harness_loop) and the bare loop, and compare
    them. `before` is called with "harness" or "bare" before each step, untimed. `clock` gives seconds.
    """
    loops = {"harness": (ours or harness_loop)(recipe, device, rounds), "bare": bare_loop(recipe, device)}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    gc.collect()
    for turn in range(WARMUP_ROUNDS + rounds):
        for name in list(loops) if turn % 2 else reversed(loops):
            before(name)
            began = clock()
            next(loops[name])
            if turn >= WARMUP_ROUNDS:
                seconds[name].append(clock() - began)
    return paired(seconds["harness"], seconds["bare"])


def paired(harness_s: Sequence[float], bare_s: Sequence[float]) -> dict[str, Any]:
    """JSON-able: the median ratio, its 95 % interval, and each loop's median step in seconds.

    One ratio for every two pairs, one of each order: a machine that gets steadily slower or faster, or
    favours the second of a pair, changes it little. A pair left over is left out.
    """
    blocks = len(harness_s) // 2
    harness, bare = (np.array(times[: 2 * blocks]).reshape(blocks, 2) for times in (harness_s, bare_s))
    ratios = harness.sum(1) / bare.sum(1)
    drawn = np.random.default_rng(0).integers(0, blocks, (RESAMPLES, blocks))
    low, high = np.percentile(np.median(ratios[drawn], axis=1), [2.5, 97.5])
    return {
        "ratio": float(np.median(ratios)),
        "ratio_low": float(low),
        "ratio_high": float(high),
        "harness_median_s": float(np.median(harness)),
        "bare_median_s": float(np.median(bare)),
        "rounds": 2 * blocks,
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
    given, name, recipe, device = asked("overhead", __doc__)
    found = compare(recipe, device, given.rounds)
    harness_ms, bare_ms = found["harness_median_s"] * 1e3, found["bare_median_s"] * 1e3
    print(
        f"{name} ({recipe.micro_batch_size} x {recipe.seq_len} tokens) on {device}, {found['rounds']} pairs "
        f"of steps: harness {harness_ms:.2f} ms, bare loop {bare_ms:.2f} ms, ratio {found['ratio']:.4f} "
        f"(95 % {found['ratio_low']:.4f} to {found['ratio_high']:.4f}; bar {BAR})"
    )
    if given.out:
        about = {"benchmark": "overhead", "recipe": name, "bar": BAR}
        keep(given.out, about, recipe, device, found)


def asked(benchmark: str, doc: str | None) -> tuple[Namespace, str, Recipe, torch.device]:
    """What the command line asks of a benchmark of ratios: its options, the recipe by name, and the device,
    where a CPU works with one thread."""
    parser = parser_of(f"benchmarks.speed.{benchmark}", doc)
    parser.add_argument("recipe", nargs="?", help=f"default: smoke {' '.join(SHORT)}")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"pairs of steps, default {ROUNDS}")
    parser.add_argument("--out", type=Path, help="write the numbers here, as JSON")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error(f"--rounds {given.rounds}: a ratio takes at least 2 pairs")
    name, recipe = load_recipe(given.recipe or "smoke", given.overrides if given.recipe else SHORT)
    device = chosen_device()
    if device.type == "cpu":
        torch.set_num_threads(1)
    return given, name, recipe, device


def keep(
    out: Path, about: dict[str, Any], recipe: Recipe, device: torch.device, found: dict[str, Any]
) -> None:
    """Write a ratio that `compare` found, with what it is about and where it was measured."""
    document = {
        **about,
        "tokens": [recipe.micro_batch_size, recipe.seq_len],
        "device": str(device),
        "threads": torch.get_num_threads(),
        **found,
        "provenance": provenance(),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
