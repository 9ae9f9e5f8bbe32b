"""Finds the steps and phases of any loop, by public hooks and by what loops/wraps.py wraps.

- forward begins at the first call of a module from outside all modules, and lasts until backward;
- backward is torch.autograd.backward, the outermost call;
- optimizer_step is from the last backward of a step to the end of the optimizer's step;
- between is what follows, until a batch is taken from a DataLoader (data) or the next forward begins;
- evaluation is a call of a trained model in eval mode, with the taking of its batches; generation is a call
  without gradients by a function named generate, outside of an evaluation; saving is torch.save and
  safetensors' save_file.
- A step ends when the optimizer steps that was seen last: where two take turns, the second one.

The global module hook is set only while no module runs: what a model calls runs as it would unwatched.
"""

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from harness.errors import InputError
from harness.loops.recorder import LoopRecorder
from harness.loops.trained import TrainedModels
from harness.loops.wraps import Wraps
from harness.virtual_gpu import clock_stopped, emulated_device

MOST_STEPS_OF_OTHERS = 100
"""After so many steps of other optimizers, an optimizer that no longer steps is not waited for any more."""
DEEPEST_GENERATE = 40
"""How many frames above a model's call are searched for `generate`."""
LOOKED_FOR = (
    "calls of torch.nn.Module with gradients (forward), torch.autograd.backward or Tensor.backward, and "
    "torch.optim.Optimizer.step, which ends a step"
)
NO_DATA_PARALLEL = (
    "torch.nn.DataParallel runs copies of the model in threads, which nobody can follow. Use one process a "
    "GPU instead: torchrun with DistributedDataParallel, which is watched a rank each."
)
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _safely(method: _Method) -> _Method:
    """A decorator of what hooks call: its failure ends the watching, not the program. It does nothing under a
    compiler's trace, once the recording is over, and in another thread than the loop's.
    """

    @functools.wraps(method)
    def safe(self: "LoopFinder", *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # checked first, so that the trace holds nothing of this function
            return
        if self.recorder.over:
            return
        if threading.get_ident() != self._thread:
            if self._depth:  # activation checkpointing recomputes, in autograd's thread of a GPU
                self._calls_in_backward = True
            return
        try:
            if not self._is_virtual:  # stopping a clock would cost time in a timed step
                method(self, *args, **kwargs)
                return
            with clock_stopped():
                method(self, *args, **kwargs)
        except Exception as error:
            self.stop(in_hook=True)
            self.recorder.give_up(error)

    return safe  # type: ignore[return-value]


class LoopFinder:
    """Tells a recorder what happens in the thread that makes it, from then on until `stop`."""

    def __init__(self, recorder: LoopRecorder, *, counts_steps: bool = True) -> None:
        """`counts_steps`: false where the user's code says where steps begin and end."""
        self.recorder = recorder
        self.counts_steps = counts_steps
        self.seen = {"forward": 0, "backward": 0, "optimizer step": 0}
        """How often each was seen."""
        self.held = False
        """Whether the user names the phase now, so that no phase is looked for."""
        self._thread = threading.get_ident()
        self._is_virtual = emulated_device() is not None
        self._begun = False
        """Whether any step has begun."""
        self._stepped: set[int] = set()
        """The optimizers, by id, that have stepped in this step."""
        self._order: list[int] = []
        """The optimizers, by id, in the order in which they were first seen."""
        self._without_last = 0
        """How often other optimizers have stepped since the last one of `_order` did."""
        self._backwards = 0
        """How many backward passes this step has had."""
        self._steps_after: set[int] = set()
        self._steps_after_before: set[int] = set()
        """After which of its backward passes an optimizer stepped, in this step and in the one before."""
        self._depth = 0
        """How many backward passes are running, one within another."""
        self._calls_in_backward = False
        """Whether modules were ever called within a backward pass; then no hook is set there any more."""
        self._trained = TrainedModels()
        self._searched = False
        """Whether modules that were compiled in place have been looked for, which no hook finds."""
        self._unscaled: Tensor | None = None
        """The loss before a GradScaler scaled it, until backward begins."""
        self._running: RemovableHandle | None = None
        self._outside: RemovableHandle | None = None
        """The hooks on the end of the module that runs, and on the next call of any module."""
        # torch warns that a compiled module's hooks fire once more, which is intended
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        self._hooks = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ends),
        ]
        self._wraps = Wraps(self)
        self._look_outside(True)

    def stop(self, *, in_hook: bool = False) -> None:
        """Remove every hook and every wrapper. `in_hook`: called by one of them, while torch goes through
        those of optimizers, none of which may go then; they do nothing once the recording is over."""
        for hook in [*(() if in_hook else self._hooks), self._outside, self._running]:
            if hook is not None:
                hook.remove()
        self._hooks, self._outside, self._running = [], None, None
        self._wraps.undo()

    def begins_with(self, caller: object) -> None:
        """Note what was being called as the watching began: a module or an optimizer's step."""
        if isinstance(caller, nn.Module):
            self._module_begins(caller, ())
        elif isinstance(caller, Optimizer):
            self._optimizer_begins(caller)

    @property
    def unfinished(self) -> bool:
        """Whether the last step that has begun was not ended by an optimizer."""
        return not self._is_over()

    @property
    def has_stepped(self) -> bool:
        """Whether any step has ended."""
        return bool(self._order)

    def found(self) -> str:
        """How often each kind of call was seen, in words."""
        return ", ".join(f"{count} x {name}" for name, count in self.seen.items())

    # Modules.

    def _look_outside(self, on: bool) -> None:
        """Set or remove the hook on the next call of any module."""
        if on and self._outside is None and self._hooks:
            self._outside = register_module_forward_pre_hook(self._module_begins)
        elif not on and self._outside is not None:
            self._outside.remove()
            self._outside = None

    @_safely
    def _module_begins(self, module: nn.Module, args: Any) -> None:
        if self._depth:
            self._calls_in_backward = True
            self._look_outside(False)
            return
        if isinstance(module, torch.jit.ScriptModule):
            return
        self._call_begins(module)
        self._running = module.register_forward_hook(self._module_ends, with_kwargs=True, always_call=True)

    def _call_begins(self, module: nn.Module) -> None:
        self._look_outside(False)
        if isinstance(module, nn.DataParallel):
            raise InputError(NO_DATA_PARALLEL)
        self.seen["forward"] += 1
        self.recorder.kept.add_model(module)
        kind = self._kind_of(module)
        if kind is None:
            return
        if kind == "forward":
            self._trained.called(module)
            self._in_step()
        elif kind == "generation" or not self._begun:
            self._in_step()
        self._enter(kind)

    @_safely
    def _module_ends(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._running is not None:
            self._running.remove()
            self._running = None
        if self.recorder.phase in ("forward", "evaluation", "generation"):
            self.recorder.inputs(args, kwargs)
        self._look_outside(True)

    @contextmanager
    def compiled_call(self, module: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
        """Around a call of a module that was compiled in place, whose hooks are compiled with it."""
        if self._outside is None or self.recorder.over or threading.get_ident() != self._thread:
            yield  # within another module
            return
        self._compiled_begins(module)
        try:
            yield
        finally:
            self._module_ends(module, args, kwargs, None)

    _compiled_begins = _safely(_call_begins)

    def _kind_of(self, module: nn.Module) -> str | None:
        """The phase that a call of this module belongs to; None for the phase that runs already."""
        phase = self.recorder.phase
        with_grad = torch.is_grad_enabled()
        if not with_grad and _in_generate():
            return "evaluation" if phase == "evaluation" else "generation"
        was_training = self._trained.mode_of(module)
        untrained = was_training is None and not with_grad and (self._trained.any or phase == "forward")
        # a loss function, a frozen encoder, a reference model
        if untrained or not self.recorder.kept.trains(module):
            return None if phase in ("forward", "evaluation", "generation") else "forward"
        if module.training:
            return "forward"
        return "evaluation" if was_training or not with_grad else "forward"

    # Steps.

    def _is_over(self) -> bool:
        """Whether this step's last optimizer has stepped."""
        return bool(self._order) and self._order[-1] in self._stepped

    def _in_step(self) -> None:
        """Note that something of a step happens: it begins the next step if this one is over."""
        if not self.counts_steps:
            return
        if self._begun and not self._is_over():
            return
        if self._begun:
            self.recorder.end_step()
        self._begun = True
        self.step_begins()

    def step_begins(self) -> None:
        """A step begins, the first or another one."""
        self._stepped.clear()
        self._steps_after_before, self._steps_after = self._steps_after, set()
        self._backwards = 0
        self.recorder.begin_step()

    def _enter(self, phase: str) -> None:
        if not self.held and self._hooks:
            self.recorder.enter(phase)

    @_safely
    def _optimizer_begins(self, optimizer: Optimizer, *_: Any) -> None:
        self.recorder.kept.add_optimizer(optimizer)
        if self._depth:  # stepped in backward
            return
        self._steps_after.add(self._backwards)
        if self.counts_steps and not self._begun:
            self._in_step()
        self._enter("optimizer_step")

    @_safely
    def _optimizer_ends(self, optimizer: Optimizer, *_: Any) -> None:
        self.seen["optimizer step"] += 1
        self._has_stepped(optimizer)

    def _has_stepped(self, optimizer: Optimizer) -> None:
        number = id(optimizer)
        if number not in self._order:
            self._order.append(number)
            self._without_last = 0
        self._stepped.add(number)
        self._without_last = 0 if number == self._order[-1] else self._without_last + 1
        if self._without_last > MOST_STEPS_OF_OTHERS:
            self._order.remove(self._order[-1])
            self._without_last = 0
        if not self._depth:
            self._enter("between")

    # What is wrapped (loops/wraps.py).

    @property
    def is_in_forward(self) -> bool:
        return self._running is not None

    @contextmanager
    def backward_runs(self, tensors: Any, *_: Any, **__: Any) -> Iterator[None]:
        """Around torch.autograd.backward; only the outermost call counts."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._depth += 1
        if self._depth == 1:
            self._backward_begins(tensors)
        try:
            yield
        except BaseException:
            self._depth -= 1  # the phase stays: the memory may have run out in it
            if not self._depth:
                self._look_outside(True)
            raise
        self._depth -= 1
        if not self._depth:
            self._backward_ends()

    @_safely
    def _backward_begins(self, roots: Any) -> None:
        if self._calls_in_backward:
            self._look_outside(False)
        self.seen["backward"] += 1
        if self._begun and self._is_over():  # no module was called since
            self._in_step()
        self._backwards += 1
        if not self._trained.any_called and not self._searched:
            self._searched = True
            self._wraps.modules_compiled_in_place()
        if self._begun or not self.counts_steps:
            self._enter("backward")
            unscaled, self._unscaled = self._unscaled, None
            for root in (
                [unscaled] if unscaled is not None else [roots] if isinstance(roots, Tensor) else roots
            ):
                if isinstance(root, Tensor):
                    self.recorder.loss(root)

    @_safely
    def _backward_ends(self) -> None:
        self._trained.backward_ended(first=self._backwards == 1)
        self._look_outside(True)
        before = self._steps_after_before
        self._enter("optimizer_step" if not before or self._backwards in before else "data")

    @_safely
    def scaled(self, scaler: torch.amp.GradScaler, loss: Any) -> None:
        """A GradScaler has scaled what backward will begin at."""
        self.recorder.kept.scaler = scaler
        self._unscaled = loss.detach() if isinstance(loss, Tensor) else None

    @contextmanager
    def scaler_steps(self, scaler: Any, optimizer: Any, *_: Any, **__: Any) -> Iterator[None]:
        """Around GradScaler.step, which may skip the optimizer's step."""
        self._optimizer_begins(optimizer)
        yield
        self._scaler_stepped(optimizer)

    _scaler_stepped = _safely(_has_stepped)

    @contextmanager
    def takes_a_batch(self, *_: Any) -> Iterator[None]:
        """Around a DataLoader's next batch."""
        self._batch_begins()
        yield

    @_safely
    def _batch_begins(self) -> None:
        if self._running is not None or self._depth:
            return
        if self._trained.is_evaluating():
            self._enter("evaluation")
        elif self._begun or not self.counts_steps:
            self._in_step()
            self._enter("data")

    @contextmanager
    def saves(self) -> Iterator[None]:
        """Around the writing of a file of tensors."""
        if threading.get_ident() != self._thread or self.recorder.over or self.held:
            yield
            return
        before = self.recorder.phase
        self._enter("saving")
        yield
        if self.recorder.phase == "saving" and before != "saving":
            self._enter(before)


def _in_generate() -> bool:
    """Whether a function named generate is among the callers."""
    frame: Any = sys._getframe(2)
    for _ in range(DEEPEST_GENERATE):
        if frame is None:
            return False
        if frame.f_code.co_name == "generate":
            return True
        frame = frame.f_back
    return False
