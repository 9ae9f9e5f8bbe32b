"""The shape cache answers what the operator itself would, on the first call and on the next ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.simulate.cuda.shape_cache import ShapeCache

aten = torch.ops.aten


class Cached(TorchDispatchMode):
    """Runs every operator through one cache, and counts those that really ran."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = ShapeCache()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.cache.run(func, args, kwargs or {})[0]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def facts(value: Any) -> Any:
    """All that a shape-only tensor is."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage().nbytes()
        return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, storage
    if isinstance(value, list | tuple):
        return [facts(item) for item in value]
    return value


CALLS: dict[str, Callable[[], Any]] = {
    "product": lambda: meta(3, 4) @ meta(4, 5),
    "of a transposed matrix": lambda: meta(4, 3).t() @ meta(4, 5),
    "sum": lambda: meta(3, 4).sum(-1, keepdim=True),
    "promotion": lambda: meta(3, dtype=torch.bfloat16) + meta(3),
    "python number": lambda: meta(3, dtype=torch.int64) * 2.0,
    "python integer": lambda: meta(3, dtype=torch.int64) * 2,
    "truth": lambda: meta(3, dtype=torch.bool) + True,
    "several results": lambda: torch.ops.aten.native_layer_norm(meta(2, 8), [8], meta(8), meta(8), 1e-5),
    "a view": lambda: meta(4, 6).view(6, 4),
    "part of a tensor": lambda: meta(4, 6)[1:, 2:],
    "pieces of one tensor": lambda: meta(4, 6).chunk(2, dim=1),
    "copy of a part": lambda: meta(4, 6)[:, ::2].contiguous(),
    "nothing to copy": lambda: meta(4, 6).contiguous(),
    "in place": lambda: meta(4).add_(meta(4)),
    "in place, several": lambda: torch._foreach_add_([meta(4), meta(2)], 1.0),
    "foreach": lambda: torch._foreach_mul([meta(4), meta(2)], 2.0),
    "channels last": lambda: meta(1, 2, 3, 4).to(memory_format=torch.channels_last) * 2,
    "expanded": lambda: meta(1, 4).expand(3, 4) * 2,
    "empty": lambda: meta(0, 4) + 1,
    "largest": lambda: meta(3, 4).max(dim=1),
    "made of nothing": lambda: torch.arange(5, device="meta"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_first_and_later_calls_give_what_the_operator_gives(call: Callable[[], Any]) -> None:
    expected = facts(call())
    with Cached():
        assert facts(call()) == expected
        assert facts(call()) == expected


def test_results_are_fresh_tensors() -> None:
    one = meta(3)
    with Cached():
        first, second = one + 1, one + 1
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata


def test_what_aliases_its_input_still_does() -> None:
    one = meta(4, 6)
    with Cached():
        for _ in range(2):
            assert one.view(24).untyped_storage()._cdata == one.untyped_storage()._cdata
            assert one.add_(1) is one
            assert one.contiguous() is one


def test_shape_changes_in_place_really_happen() -> None:
    with Cached():
        for _ in range(2):
            one = meta(4, 6)
            one.t_()
            assert one.shape == (6, 4)
            one.resize_(2, 2)
            assert one.shape == (2, 2)
            one.unsqueeze_(0)
            assert one.shape == (1, 2, 2)


def test_real_tensors_are_computed() -> None:
    with Cached():
        for value in (1.0, 2.0):
            assert (torch.tensor([value]) + 1).item() == value + 1
            assert torch.tensor([value]).mul_(3).item() == 3 * value


def test_the_default_dtype_belongs_to_the_question() -> None:
    before = torch.get_default_dtype()
    try:
        with Cached():
            for dtype in (torch.float32, torch.bfloat16):
                torch.set_default_dtype(dtype)
                assert torch.ones(3, device="meta").dtype == dtype
                assert (meta(3, dtype=torch.int64) / 2).dtype == dtype
    finally:
        torch.set_default_dtype(before)


def test_a_known_answer_does_not_run_the_operator() -> None:
    cache = ShapeCache()
    ran: list[str] = []

    class Counted:
        """aten.mm.default, counting."""

        _schema = aten.mm.default._schema
        tags = aten.mm.default.tags
        is_view = False

        def __call__(self, *args: Any) -> Tensor:
            ran.append("mm")
            return aten.mm.default(*args)

    counted = Counted()
    for _ in range(3):
        assert cache.run(counted, (meta(3, 4), meta(4, 5)), {})[0].shape == (3, 5)
    assert ran == ["mm"]
    assert cache.run(counted, (meta(2, 4), meta(4, 5)), {})[0].shape == (2, 5)
    assert ran == ["mm", "mm"]
    assert ShapeCache().run(counted, (meta(3, 4), meta(4, 5)), {})[0].shape == (3, 5)
    assert ran == ["mm", "mm"]  # what another simulation of this process found
