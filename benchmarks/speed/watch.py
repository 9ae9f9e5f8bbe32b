"""What watching costs: a bare loop's step that is watched, not recorded, over one that nobody watches.

The loop is benchmarks/speed/overhead.py's bare one, and so is the way to compare: both take turns in one
process. Hooks are put in before each step, and taken away again before a bare one, untimed. Within a
watched step everything is timed that watching adds: the hooks, the times of its phases, its loss read, and
its line in the log. Steps outside the recorded ones have no other kind: their phases are always timed. On a
CPU the clock is the processor time of the process, which what else runs there changes little. Bar: 1.01.

    python -m benchmarks.speed.watch [RECIPE] [key=value ...] [--rounds N] [--out FILE]
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.speed.overhead import asked, bare_loop, compare, keep
from harness.loops.finder import LoopFinder
from harness.loops.memory_of_steps import Window
from harness.loops.recorder import LoopRecorder
from harness.recipe import Recipe
from harness.run_folder import RunFolder

BAR = 1.01
NEVER = Window(10**9, 10**9)


class Watching:
    """Hooks that come and go, and a loop that is watched while they are there."""

    def __init__(self, folder: Path) -> None:
        self.recorder = LoopRecorder(RunFolder(folder, "watch", ["bare loop"]), ["bare loop"], NEVER)
        self.finder: LoopFinder | None = None

    def before(self, name: str) -> None:
        """A step of `name` follows."""
        if self.finder is not None:
            self.finder.stop()
        self.finder = LoopFinder(self.recorder, counts_steps=False)  # before both: it is work for the caches
        if name == "bare":
            self.finder.stop()

    def loop(self, recipe: Recipe, device: torch.device, rounds: int) -> Iterator[Tensor]:
        """The bare loop, each step of which is watched."""
        bare = bare_loop(recipe, device)
        while True:
            assert self.finder is not None
            self.finder.step_begins()
            self.recorder.enter("data")
            loss = next(bare)
            self.recorder.end_step()
            yield loss


def main() -> None:
    given, name, recipe, device = asked("watch", __doc__)
    with tempfile.TemporaryDirectory() as folder:
        watching = Watching(Path(folder) / "run")
        clock = time.process_time if device.type == "cpu" else time.perf_counter
        found = compare(recipe, device, given.rounds, watching.loop, watching.before, clock)
    names = {"harness_median_s": "watched_median_s"}
    found = {names.get(key, key): value for key, value in found.items()}
    print(
        f"{name} on {device}, {found['rounds']} pairs of steps: "
        f"watched {found['watched_median_s'] * 1e3:.2f} ms, bare {found['bare_median_s'] * 1e3:.2f} ms, "
        f"ratio {found['ratio']:.4f} (95 % {found['ratio_low']:.4f} to {found['ratio_high']:.4f}; bar {BAR})"
    )
    if given.out:
        keep(given.out, {"benchmark": "watch", "recipe": name, "bar": BAR}, recipe, device, found)


if __name__ == "__main__":
    main()
