"""`with harness.watch(model, optimizer) as watch:` around a loop of one's own."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from torch import nn
from torch.optim import Optimizer

from harness.errors import InputError
from harness.loops.finder import NO_DATA_PARALLEL, LoopFinder
from harness.loops.process import recorder_of_script, watched_already
from harness.step_profile import OTHER_PHASES, PHASES
from harness.system import complain

_Item = TypeVar("_Item")


class watch:
    """Watches a loop: call `step()` at the end of each step. Phases are found, or named with `phase(...)`.

    The run folder is that of `harness run`, with the script in place of a recipe: `harness report FOLDER`
    shows it. The program's own results do not change.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module] = (),
        optimizer: Optimizer | Iterable[Optimizer] = (),
        *,
        steps: tuple[int, int] = (3, 5),
        out: str | Path | None = None,
    ) -> None:
        """- `model`, `optimizer`: one or several; what is seen in the loop is added.
        - `steps`: the first and the last step whose memory is recorded, counted from 1.
        - `out`: the run folder, which must not hold a run; None: profiles/runs/<script>-<time>. Of several
          ranks each has a folder ranks/N in it.

        Raises InputError for impossible steps, DataParallel, what is no model or no optimizer of torch, and a
        folder that is taken or cannot be written.
        """
        models, optimizers = _all_of(model, nn.Module), _all_of(optimizer, Optimizer)
        if any(isinstance(each, nn.DataParallel) for each in models):
            raise InputError(NO_DATA_PARALLEL)
        self._recorder = recorder_of_script(steps, out)
        for each in models:
            self._recorder.kept.add_model(each)
        for each in optimizers:
            self._recorder.kept.add_optimizer(each)
        self._finder: LoopFinder | None = None

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._recorder.folder.path

    def __enter__(self) -> "watch":
        if watched_already():
            complain("this process is watched already: harness.watch does nothing in it.", 0)
            self._recorder.over = True
            return self
        self._finder = LoopFinder(self._recorder, counts_steps=False)
        self._finder.step_begins()
        self._recorder.enter("data")
        return self

    def step(self) -> None:
        """Say that a step is over: the optimizer has stepped."""
        if self._finder is None or self._recorder.over:
            return
        try:
            self._recorder.end_step()
            self._finder.step_begins()
            self._recorder.enter("data")
        except InputError as error:
            self._finder.stop()
            self._recorder.give_up(error)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Everything inside belongs to the phase `name`: data, forward, backward, optimizer_step, between,
        evaluation, generation or saving. Raises InputError for another name.
        """
        if name not in (*PHASES, *OTHER_PHASES):
            raise InputError(f"phase {name!r}: give one of {', '.join((*PHASES, *OTHER_PHASES))}.")
        if self._finder is None or self._recorder.over:
            yield
            return
        before, self._finder.held = self._finder.held, True
        with self._recorder.inside(name):
            yield
        self._finder.held = before

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._finder is None or self._recorder.over:
            return
        self._finder.stop()
        if error is not None:
            self._recorder.failed(error)
        elif self._recorder.steps == 1:
            self._recorder.over = True
            complain(
                f"no step was found: watch.step() was not called ({self._finder.found()}). Call it after "
                "each optimizer.step(). Nothing is written.",
                1,
            )
        else:
            self._recorder.finish(unfinished=True)


def _all_of(given: _Item | Iterable[_Item], kind: type[_Item]) -> list[_Item]:
    """One object or several of class `kind`, as a list. Raises InputError for an object of another class."""
    several = [given] if isinstance(given, kind) or not isinstance(given, Iterable) else list(given)
    for each in several:
        if not isinstance(each, kind):
            raise InputError(
                f"harness.watch: a {type(each).__name__} is no {kind.__module__.removesuffix('.optimizer')}"
                f".{kind.__name__}. Give one or several, or leave it out."
            )
    return several
