"""A callback for transformers' Trainer and all of TRL's trainers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from harness.loops.finder import LoopFinder
from harness.loops.process import recorder_of_script, until_the_end, watched_already


@functools.cache
def _callback_class() -> type:
    from transformers import TrainerCallback

    class WatchingCallback(TrainerCallback):
        """Watches a Trainer from the beginning of its training to the end."""

        def __init__(self, steps: tuple[int, int], out: str | Path | None) -> None:
            self._steps, self._out = steps, out
            self._end: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not watched_already():
                self._end = until_the_end(LoopFinder(recorder_of_script(self._steps, self._out)))

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self._end is not None:
                self._end()

    return WatchingCallback


def HarnessCallback(steps: tuple[int, int] = (3, 5), out: str | Path | None = None) -> Any:
    """A transformers.TrainerCallback that records `steps` (first and last, counted from 1) into `out`.

    `Trainer(..., callbacks=[harness.HarnessCallback()])`. None for `out`: profiles/runs/<script>-<time>.
    Under `harness watch` it does nothing: the process is watched already.
    """
    return _callback_class()(steps, out)
