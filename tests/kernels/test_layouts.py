"""On meta the results of elementwise operators are laid out as PyTorch's kernels lay them out: what comes
after them copies a layout that it cannot take. The oracle is the CPU's kernels, whose iterator is CUDA's."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.kernels.operators import OPERATORS, operator_of
from harness.kernels.without_temporaries import ELEMENTWISE
from tests.support.releases import of_tested_releases

OTHERWISE = {
    "aten::native_dropout_backward": "on CUDA one kernel, whose result is contiguous; on the CPU a product",
    "aten::log_sigmoid_backward": "on CUDA its result is laid out as the gradient, unless that is broadcast",
    "aten::floor_divide": "of integers, and of numbers",
    "aten::logical_and": "of masks, of which none is broadcast before the other",
    "aten::polar": "of two tensors that are made alike",
    "aten::threshold_backward": "of an output, which is never broadcast",
}
"""Operators whose layouts on meta differ from the CPU's, in some release, and why it does not matter."""
SHAPE = (2, 6, 4)
LAYOUTS: dict[str, Callable[[torch.device], Tensor]] = {
    "contiguous": lambda device: torch.ones(2, 6, 4, device=device),
    "heads before tokens": lambda device: torch.ones(2, 4, 6, device=device).transpose(1, 2),
    "tokens before rows": lambda device: torch.ones(6, 2, 4, device=device).transpose(0, 1),
    "broadcast": lambda device: torch.ones(2, 1, 4, device=device).expand(SHAPE),
    "a part": lambda device: torch.ones(2, 6, 8, device=device)[..., :4],
}
CPU, META = torch.device("cpu"), torch.device("meta")


def calls(overload: Any) -> list[tuple[Callable[[torch.device], list[Any]], str]]:
    """The arguments of a call with every combination of layouts, on any device; empty where some argument is
    neither a tensor nor a number."""
    required = [each for each in overload._schema.arguments if not each.has_default_value()]
    numbers = {"number": 0.5, "float": 0.5, "int": 1, "bool": False}
    if any(str(each.type) not in {*numbers, "Tensor"} or each.kwarg_only for each in required):
        return []
    given = [str(each.type) for each in required]

    def arguments(layouts: tuple[str, ...], device: torch.device) -> list[Any]:
        left = iter(layouts)
        return [LAYOUTS[next(left)](device) if kind == "Tensor" else numbers[kind] for kind in given]

    combinations = product(LAYOUTS, repeat=given.count("Tensor"))
    return [(lambda device, of=each: arguments(of, device), ", ".join(each)) for each in combinations]


ELEMENTWISE_OPERATORS = [name for name, known in OPERATORS.items() if known.nothing == ELEMENTWISE]


def overloads(name: str) -> list[Any]:
    """Those that make one new tensor."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
    found = [getattr(packet, overload) for overload in packet.overloads()]
    return [
        each for each in found if [r.alias_info or str(r.type) for r in each._schema.returns] == ["Tensor"]
    ]


def on_meta(overload: Any, arguments: list[Any]) -> Any:
    """What a simulated call returns."""
    result = operator_of(overload).result
    out = NotImplemented if result is None else result(overload, arguments, {})
    return overload(*arguments) if out is NotImplemented else out


def differences(name: str) -> list[str]:
    """Layouts of arguments from which a result is laid out otherwise on meta than by the CPU's kernel."""
    differ: list[str] = []
    for overload in overloads(name):
        for arguments, layouts in calls(overload):
            try:
                expected = overload(*arguments(CPU))
            except RuntimeError:  # of other dtypes
                continue
            if expected.stride() != on_meta(overload, arguments(META)).stride():
                differ.append(layouts)
    return differ


@pytest.mark.parametrize("name", ELEMENTWISE_OPERATORS)
def test_a_result_is_laid_out_as_by_the_kernel(name: str) -> None:
    assert name in OTHERWISE or not differences(name)


@of_tested_releases("torch")
def test_those_that_differ_do() -> None:
    assert all(map(differences, OTHERWISE))


def test_most_operators_are_tried() -> None:
    tried = [name for name in ELEMENTWISE_OPERATORS if any(map(calls, overloads(name)))]
    assert len(tried) > 50


GRADIENTS: dict[str, Callable[[torch.device, Tensor], Any]] = {
    "layer norm": lambda device, gradient: (
        torch.ops.aten.native_layer_norm_backward.default,
        [
            *(gradient, torch.ones(SHAPE, device=device), [4]),
            *(torch.ones(2, 6, 1, device=device) for _ in range(2)),
            *(torch.ones(4, device=device) for _ in range(2)),
            [True, True, True],
        ],
    ),
    "log softmax": lambda device, gradient: (
        torch.ops.aten._log_softmax_backward_data.default,
        [gradient, torch.ones(SHAPE, device=device), -1, torch.float32],
    ),
    "softmax": lambda device, gradient: (
        torch.ops.aten._softmax_backward_data.default,
        [gradient, torch.ones(SHAPE, device=device), -1, torch.float32],
    ),
}
"""Operators of backward that are not elementwise, given a gradient."""


@pytest.mark.parametrize("call", GRADIENTS.values(), ids=GRADIENTS.keys())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_laid_out_as_by_the_kernel(layout: str, call: Callable[..., Any]) -> None:
    def strides(device: torch.device, run: Callable[[Any, list[Any]], Any]) -> list[Any]:
        out = run(*call(device, LAYOUTS[layout](device)))
        return [each.stride() for each in (out if isinstance(out, tuple) else (out,))]

    assert strides(META, on_meta) == strides(CPU, lambda overload, given: overload(*given))
