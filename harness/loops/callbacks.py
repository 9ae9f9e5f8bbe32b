"""Callbacks for transformers' Trainer, and so for all of TRL's trainers, and for Lightning's."""

import functools
from pathlib import Path
from typing import Any

from harness.loops.finder import LoopFinder
from harness.loops.process import recorder_of_script, until_the_end, watched_already


class _Watching:
    """Watches a trainer from the beginning of its training to the end."""

    def __init__(self, steps: tuple[int, int], out: str | Path | None) -> None:
        self._steps, self._out = steps, out
        self._finder: LoopFinder | None = None
        self._end: Any = None
        """Ends the watching."""

    def _begins(self) -> None:
        if not watched_already():
            self._finder = LoopFinder(recorder_of_script(self._steps, self._out))
            self._end = until_the_end(self._finder)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._end is not None:
            self._end()


@functools.cache
def _of_transformers() -> type:
    from transformers import TrainerCallback

    class WatchingCallback(_Watching, TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._begins()

    return WatchingCallback


@functools.cache
def _of_lightning() -> type:
    from lightning.pytorch import Callback

    class WatchingCallback(_Watching, Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._begins()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            if self._finder is not None:
                self._finder.recorder.failed(exception)

    return WatchingCallback


def HarnessCallback(steps: tuple[int, int] = (3, 5), out: str | Path | None = None) -> Any:
    """A transformers.TrainerCallback that records `steps` (first and last, counted from 1) into `out`.

    `Trainer(..., callbacks=[harness.HarnessCallback()])`. None for `out`: profiles/runs/<script>-<time>.
    Under `harness watch` it does nothing: the process is watched already.
    """
    return _of_transformers()(steps, out)


def HarnessLightningCallback(steps: tuple[int, int] = (3, 5), out: str | Path | None = None) -> Any:
    """A lightning.pytorch.Callback that records `steps` (first and last, counted from 1) into `out`.

    `Trainer(..., callbacks=[harness.HarnessLightningCallback()])`. None for `out`:
    profiles/runs/<script>-<time>. Under `harness watch` it does nothing: the process is watched already.
    """
    return _of_lightning()(steps, out)
