"""Which module an operator belongs to: in forward, backward, and a checkpointed block's second forward."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from harness.simulate.module_paths import ModulePaths


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.exp().sum()


class Seen(TorchDispatchMode):
    """Notes the module of every operator, by (part of the step, operator)."""

    def __init__(self, paths: ModulePaths) -> None:
        super().__init__()
        self.paths = paths
        self.part = "forward"
        self.modules: dict[tuple[str, str], list[str]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.modules[self.part, func._overloadpacket.__name__].append(self.paths.current())
        return func(*args, **(kwargs or {}))


def step(checkpointed: bool) -> dict[tuple[str, str], list[str]]:
    model, paths = Model(checkpointed), ModulePaths()
    paths.name(model)
    seen = Seen(paths)
    with paths.watching(), seen:
        loss = model(torch.ones(2, 4))
        seen.part = "backward"
        loss.backward()
    return seen.modules


def test_forward_operators_belong_to_the_innermost_module() -> None:
    modules = step(checkpointed=False)
    assert modules["forward", "addmm"] == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
    assert modules["forward", "tanh"] == ["blocks.0", "blocks.1"]
    assert modules["forward", "exp"] == [""]  # the model itself


def test_backward_operators_belong_to_the_module_of_their_forward() -> None:
    modules = step(checkpointed=False)
    assert modules["backward", "tanh_backward"] == ["blocks.1", "blocks.0"]
    # two products for each linear layer, weight and input, but for the first one's input
    assert modules["backward", "mm"] == [
        *["blocks.1.down"] * 2,
        *["blocks.1.up"] * 2,
        *["blocks.0.down"] * 2,
        "blocks.0.up",
    ]


def test_a_checkpointed_blocks_second_forward_is_its_own() -> None:
    modules = step(checkpointed=True)
    # it stops as soon as all that was saved is there again: the last product is not repeated
    assert modules["backward", "addmm"] == ["blocks.1.up", "blocks.0.up"]
    assert modules["backward", "tanh"] == ["blocks.1", "blocks.0"]
    assert modules["backward", "tanh_backward"] == ["blocks.1", "blocks.0"]


def test_a_failing_module_does_not_stay_the_current_one() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no")

    model, paths = nn.Sequential(Failing()), ModulePaths()
    paths.name(model)
    with paths.watching():
        with pytest.raises(RuntimeError, match="no"):
            model(torch.ones(1))
        assert paths.current() == ""


def test_nothing_is_followed_outside_and_modules_unknown_count_for_those_around_them() -> None:
    model, paths = Block(), ModulePaths()
    paths.name(model)
    seen = Seen(paths)
    with seen:
        model(torch.ones(2, 4))
    assert set(seen.modules["forward", "addmm"]) == {""}
    wrapped = nn.Sequential(model)  # has no name, nor has what it adds
    with paths.watching(), seen:
        wrapped(torch.ones(2, 4))
    assert seen.modules["forward", "addmm"][-2:] == ["up", "down"]


def test_a_forgotten_steps_nodes_have_no_module() -> None:
    model, paths = Model(checkpointed=False), ModulePaths()
    paths.name(model)
    seen = Seen(paths)
    with paths.watching(), seen:
        loss = model(torch.ones(2, 4))
        paths.forget()
        loss.backward()
    assert set(seen.modules["forward", "tanh_backward"]) == {""}
