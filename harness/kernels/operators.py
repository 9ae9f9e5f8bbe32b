"""What one operator does on CUDA, all of it found by the name in its schema: "aten::mm".

What a new operator needs: one declaration, in the file of its kernels. `@kernel("mm bmm")` stands on the rule
of operators that take memory inside, or allocate their outputs in another order than they return them;
`declare("add mul", nothing=...)` (kernels/without_temporaries.py) says why others take none. Either
gives the rest as well, where the schema does not say it: the fields of Operator. An operator that no
declaration gives a `script` or a `nothing` may take memory that nobody knows of: a profile names it.

Only its FLOPs stand one floor below, in observe/flops.py and by the same name: they are counted in real runs
too, which know nothing of what is simulated. Every size was compared with the allocations of torch's own CUDA
host code (2.11 and 2.13, CUDA 13) for thousands of shapes; sources are under pytorch's aten/src/ATen/native.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

from harness.kernels.gpu import Gpu
from harness.kernels.script import Script, Step


@dataclass(frozen=True)
class Operator:
    """One operator, all its overloads. The defaults are those of one that nobody has looked at."""

    script: Callable[..., None] | None = None
    """Writes what the kernels do with the allocator. Its parameters are the operator's, by the names in the
    schema, and `script`, `gpu` and `outputs`; none: outputs are allocated in the order they are returned."""
    nothing: str | None = None
    """Why the kernels take nothing but their outputs: somebody has looked at their sources."""
    result: Callable[[Any, Any, Any], Any] | None = None
    """(func, args, kwargs) to what CUDA returns, where a shape function is missing, differs or costs time.
    NotImplemented: as the shape function says."""
    launches: bool = True
    """A kernel. Otherwise it takes memory and leaves it as it is, or looks at it in another way."""
    unread: int | None = None
    """The position of an argument that is not read."""
    looks_up: bool = False
    """Reads as much of its first argument as it returns (of a loss: one number a row)."""
    scatters: bool = False
    """Touches its first argument only where the values go: as many bytes as those have."""


OPERATORS: dict[str, Operator] = {}
"""By name. Filled as the files of kernels are imported, by `harness.kernels`."""
UNKNOWN = Operator()


def declare(names: str, **facts: Any) -> None:
    """The facts (fields of Operator) of these operators, separated by spaces, of `aten` unless told."""
    for name in names.split():
        name = name if "::" in name else f"aten::{name}"
        assert name not in OPERATORS, f"{name} is declared twice"
        OPERATORS[name] = Operator(**facts)


def kernel(names: str, **facts: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The decorated function is `Operator.script` of these operators. See `declare`."""

    def declared(rule: Callable[..., None]) -> Callable[..., None]:
        declare(names, script=rule, **facts)
        return rule

    return declared


def returns_nothing(func: Any, args: Any, kwargs: Any) -> None:
    """`Operator.result` of one that writes into tensors that are there already."""


def returns_first(func: Any, args: Any, kwargs: Any) -> Any:
    """Of one that returns its first argument: what it works on in place, or waits for."""
    return args[0]


def operator_name(func: Any) -> str:
    """ "aten::mm" of torch.ops.aten.mm.default."""
    return func._schema.name


def operator_of(func: Any) -> Operator:
    """What is known of an operator, whichever its overload."""
    return OPERATORS.get(operator_name(func), UNKNOWN)


def unknown_ops(names: Iterable[str]) -> list[str]:
    """Those of the operators ("aten::mm") that nobody has looked at."""
    found = ((name, OPERATORS.get(name, UNKNOWN)) for name in set(names))
    return sorted(name for name, known in found if known.script is None and known.nothing is None)


def script_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, gpu: Gpu) -> Sequence[Step]:
    """What the CUDA kernel of `func` takes and frees for these arguments (meta tensors will do), in order and
    between the storages of its outputs. No steps: only the outputs are allocated, in the order returned.
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
