"""Memory that CUDA kernels take while they run and that shape-only execution does not show.

`temporaries` gives, for one operator call, what its CUDA implementation takes from the caching allocator and
gives back before it returns, in order, between the storages of its outputs. Every size was compared with the
allocations of torch's own CUDA host code (2.11 and 2.13, CUDA 13) for thousands of shapes; each rule names
its source under pytorch's aten/src/ATen/native. What cuBLAS keeps is in simulate/kernels/matmul.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.simulate.kernels.attention_choice import capability_of, torch_release
from harness.simulate.kernels.rules import RULES, Arguments, Outputs
from harness.simulate.kernels.script import Free, Gpu, Output, Script, Step, Take
from harness.simulate.kernels.without_temporaries import LOOKED_AT


@dataclass(frozen=True)
class Temporaries:
    """What one operator call does with the allocator."""

    steps: tuple[Step, ...] = ()
    """In order. No steps: only the outputs are allocated, in the order they are returned."""

    @property
    def before(self) -> tuple[int, ...]:
        """Bytes of the temporaries allocated before the first output."""
        return self._sizes()[0]

    @property
    def after(self) -> tuple[int, ...]:
        """Bytes of the temporaries allocated after the first output."""
        return self._sizes()[1]

    @property
    def peak_bytes(self) -> int:
        """The most that all temporaries take at one moment, without the outputs."""
        taken: list[int] = []
        live = peak = 0
        for step in self.steps:
            if isinstance(step, Take):
                taken.append(step.size_bytes)
                live += step.size_bytes
            elif isinstance(step, Free):
                live -= taken[step.temporary]
            peak = max(peak, live)
        return peak

    def _sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        first = next((i for i, s in enumerate(self.steps) if isinstance(s, Output)), len(self.steps))
        before, after = self.steps[:first], self.steps[first:]
        return tuple(s.size_bytes for s in before if isinstance(s, Take)), tuple(
            s.size_bytes for s in after if isinstance(s, Take)
        )


NOTHING = Temporaries()


def gpu(compute_capability: str, sm_count: int, torch_version: str) -> Gpu:
    """gpu("9.0", 132, "2.13.0+cu130")."""
    return Gpu(capability_of(compute_capability), sm_count, torch_release(torch_version))


def temporaries(func: Any, args: Sequence[Any], kwargs: Arguments, out: Any, gpu: Gpu) -> Temporaries:
    """What the CUDA kernel of `func` takes and frees for these arguments (meta tensors will do)."""
    rule = RULES.get(operator_name(func))
    if rule is None:
        return NOTHING
    script = Script()
    rule(script, _bound(func, args, kwargs), _as_sequence(out), gpu)
    return Temporaries(tuple(script.steps))


def unknown_ops(names: Iterable[str]) -> list[str]:
    """Those of the operators ("aten::mm") that nobody has looked at."""
    return sorted(set(names) - LOOKED_AT - RULES.keys())


def operator_name(func: Any) -> str:
    """ "aten::mm" of torch.ops.aten.mm.default."""
    return func._schema.name


def _bound(func: Any, args: Sequence[Any], kwargs: Arguments) -> Arguments:
    values = {}
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            values[argument.name] = args[position]
        elif argument.name in kwargs:
            values[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            values[argument.name] = argument.default_value
    return values


def _as_sequence(out: Any) -> Outputs:
    return out if isinstance(out, list | tuple) else [out]
