"""Finds the module that an operator belongs to, in forward and in backward.

In forward it is the innermost module that is being called. In backward it is the module whose forward made
the autograd node that runs: nodes are numbered in the order in which they are made, so that the number of the
latest node is noted at each forward operator.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch.nn.modules import module as nn_module


class ModulePaths:
    """The path of the module that is running, as in `model.layers.0.mlp`; empty outside of any module."""

    def __init__(self) -> None:
        self._names: dict[nn.Module, str] = {}
        """The path of each module."""
        self._stack: list[str] = [""]
        """The paths of the modules that are being called, the innermost last."""
        self._by_sequence: dict[int, str] = {}
        """The path of the module that made each autograd node, by the node's sequence number."""
        self.of_last_node = ""
        """The path of the module whose autograd node ran last. Autograd adds up the gradients of a tensor
        that is used more than once between two nodes."""

    def name(self, model: nn.Module) -> None:
        """Learn the paths of a model's modules."""
        self._names = {module: name for name, module in model.named_modules()}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While inside, calls of named modules are followed."""
        before = nn_module.register_module_forward_pre_hook(self._enter)
        after = nn_module.register_module_forward_hook(self._exit, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    @property
    def in_module(self) -> bool:
        """Whether a module is being called. In backward this is a checkpointed block's second forward."""
        return len(self._stack) > 1

    def current(self) -> str:
        """The path of the module the running operator belongs to."""
        node = torch._C._current_autograd_node()
        if node is not None and not self.in_module:
            self.of_last_node = self._by_sequence.get(node._sequence_nr(), "")
            return self.of_last_node
        path, made_last = self._stack[-1], _get_sequence_nr() - 1
        if torch.is_grad_enabled():
            self._by_sequence[made_last] = path
        else:  # within an autograd function of its own, whose node is made before its forward
            self._by_sequence.setdefault(made_last, path)
        return path

    def forget(self) -> None:
        """Forget the autograd nodes, since the step that made them is over."""
        self._by_sequence.clear()
        self.of_last_node = ""

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._stack.append(self._names.get(module, self._stack[-1]))

    def _exit(self, module: nn.Module, _: Any, __: Any) -> None:
        self._stack.pop()
