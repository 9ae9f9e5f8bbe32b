"""What one operator does on CUDA, all of it found by the name in its schema: "aten::mm".

A new operator needs one declaration, in the file of its kernels. `@kernel("mm bmm")` decorates the rule of
operators that allocate memory inside, or allocate their outputs in another order than they return them;
`declare("add mul", nothing=...)` (kernels/without_temporaries.py) says why others allocate none. Either also
gives what the schema does not say: the fields of Operator. An operator without a `script` and a `nothing` may
take memory that is not known: a profile names it in a warning.

Only the FLOPs are elsewhere, in observe/flops.py, by the same name: measured runs count them too, and know
nothing of what is simulated. Every size was compared with the allocations of torch's own CUDA
host code (2.11 and 2.13, CUDA 13) for thousands of shapes; sources are under pytorch's aten/src/ATen/native.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

import torch

from harness.kernels.gpu import Gpu
from harness.kernels.script import Script, Step


@dataclass(frozen=True)
class Operator:
    """One operator with all its overloads. The defaults are those of one that nobody has looked at."""

    script: Callable[..., None] | None = None
    """The rule: it writes what the kernels do with the allocator. Its parameters are the operator's, by the
    names in the schema, and `script`, `gpu` and `outputs`. None: outputs are allocated as they are returned.
    """
    nothing: str | None = None
    """Why the kernels allocate nothing but their outputs, as somebody has read in their sources."""
    result: Callable[[Any, Any, Any], Any] | None = None
    """A function of (func, args, kwargs) that gives what CUDA returns, where the operator's shape function is
    missing, differs or costs time. It returns NotImplemented where the shape function is right."""
    launches: bool = True
    """Whether it launches a kernel that computes or copies. Otherwise it allocates without writing, returns a
    view, or communicates: that time is of the links."""
    unread: int | None = None
    """The position of an argument that is not read."""
    given_back: int | None = None
    """The position of a result that is an argument, where the schema does not say so."""
    looks_up: bool = False
    """Whether it reads only as many bytes of its first argument as it returns (a loss: one number a row)."""
    scatters: bool = False
    """Whether it touches its first argument only where the values go: as many bytes as these have."""
    again: int = 0
    """How many more tensors as large as its result its kernels read or write, as one what another wrote."""


OPERATORS: dict[str, Operator] = {}
"""The declared operators by name. It is filled when `harness.kernels` imports the files of kernels."""
UNKNOWN = Operator()


def declare(names: str, **facts: Any) -> None:
    """Declare `facts` (fields of Operator) of operators. `names` are separated by spaces; one without a
    namespace is of `aten`."""
    for name in names.split():
        name = name if "::" in name else f"aten::{name}"
        assert name not in OPERATORS, f"{name} is declared twice"
        OPERATORS[name] = Operator(**facts)


def kernel(names: str, **facts: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare the decorated function as `Operator.script` of operators; `names`, `facts` as in `declare`."""

    def declared(rule: Callable[..., None]) -> Callable[..., None]:
        declare(names, script=rule, **facts)
        return rule

    return declared


def returns_nothing(func: Any, args: Any, kwargs: Any) -> None:
    """The `Operator.result` of an operator that only writes into its arguments."""


def contiguous_first(func: Any, args: Any, kwargs: Any) -> Any:
    """The `Operator.result` of an operator whose kernel makes its first result contiguous. On meta it is laid
    out as the first argument, a gradient."""
    if args[0].is_contiguous():
        return NotImplemented
    out = func(*args, **kwargs)
    first, *others = out if isinstance(out, tuple) else (out,)
    first = first if first is None else torch.empty_like(first, memory_format=torch.contiguous_format)
    return (first, *others) if others else first


def returns_first(func: Any, args: Any, kwargs: Any) -> Any:
    """The `Operator.result` of an operator that returns its first argument (in place, or waited for)."""
    return args[0]


def operator_name(func: Any) -> str:
    """ "aten::mm" for torch.ops.aten.mm.default."""
    return func._schema.name


def operator_of(func: Any) -> Operator:
    """What is declared of an operator, whichever its overload; UNKNOWN where nothing is."""
    return OPERATORS.get(operator_name(func), UNKNOWN)


def unknown_ops(names: Iterable[str]) -> list[str]:
    """Which of the operators ("aten::mm") nobody has looked at, sorted."""
    found = ((name, OPERATORS.get(name, UNKNOWN)) for name in set(names))
    return sorted(name for name, known in found if known.script is None and known.nothing is None)


def script_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, gpu: Gpu) -> Sequence[Step]:
    """The steps of the CUDA kernels of `func` for these arguments (shape-only tensors will do): what they
    allocate and free, and when among that the storages of the outputs. Without steps only the outputs are
    allocated, in the order returned.
    """
    rule = operator_of(func).script
    if rule is None:
        return ()
    script = Script()
    given: dict[str, Any] = {
        "script": script,
        "gpu": gpu,
        "outputs": out if isinstance(out, list | tuple) else [out],
    }
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            given[argument.name] = args[position]
        elif argument.name in kwargs or argument.has_default_value():
            given[argument.name] = kwargs.get(argument.name, argument.default_value)
    rule(**{name: given[name] for name in _parameters(rule) & given.keys()})
    return tuple(script.steps)


@cache
def _parameters(rule: Callable[..., None]) -> frozenset[str]:
    return frozenset(signature(rule).parameters)
