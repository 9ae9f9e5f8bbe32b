"""Integers on the simulated device have the values that a CPU computes, as long as those are known."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.simulate.cuda.known_values import MOST_BYTES, with_values
from harness.simulate.cuda.shape_cache import ShapeCache

GRID = [[1, 8, 12], [1, 4, 6]]


class _Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.shapes = ShapeCache()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return with_values(func, args, kwargs or {}, self.shapes.run)[0]


@contextmanager
def on_meta() -> Iterator[Tensor]:
    """A grid of patches on the device."""
    with _Mode():
        yield torch.tensor(GRID).to("meta")


def lengths(grid: Tensor) -> Tensor:
    each = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])
    return torch.nn.functional.pad(each.cumsum(0, dtype=torch.int32), (1, 0), value=0)


def in_place(grid: Tensor) -> Tensor:
    found = torch.zeros_like(grid)
    found[grid > 5] = 7
    found[:, 0] += grid[:, 2]
    return found


@pytest.mark.parametrize(
    "computed",
    [
        lengths,
        in_place,
        lambda grid: grid.prod(-1) // 4,
        lambda grid: grid[grid > 4],
        lambda grid: (grid > 4).nonzero(),
        lambda grid: torch.unique_consecutive(grid.flatten()),
        lambda grid: torch.arange(10, device=grid.device)[grid[:, 2].clamp(max=9)],
    ],
)
def test_values_are_those_of_the_cpu(computed: Any) -> None:
    with on_meta() as grid:
        there = computed(grid)
        assert there.is_meta
        assert there.tolist() == computed(torch.tensor(GRID)).tolist()


def test_floats_chosen_by_a_known_mask_are_as_many_as_it_says() -> None:
    with on_meta() as grid:
        floats = torch.empty(2, 3, device="meta")
        assert floats[grid > 4].shape == (3,)
        assert floats.masked_select(grid > 4).shape == (3,)


def test_what_comes_of_floats_is_not_known() -> None:
    with on_meta() as grid:
        guessed = torch.empty(2, 3, device="meta") > 0
        assert not hasattr(guessed, "known_values")
        grid.masked_fill_(guessed, 3)
        assert not hasattr(grid, "known_values")


def test_no_float_is_infinite() -> None:
    with on_meta():
        assert not torch.empty(3, device="meta").isinf().any().item()


def test_values_of_a_large_mask_are_not_kept() -> None:
    with on_meta() as grid:
        side = torch.arange(MOST_BYTES // 1024, device=grid.device)
        assert not hasattr(side[:, None] >= side[None, :], "known_values")
