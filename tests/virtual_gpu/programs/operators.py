"""Every operator of PyTorch's own list (OpInfo), given integers and booleans of the host: on the virtual
GPU its results are the CPU's, or nobody knows them and a sentence says so when they are looked at.
Never another value.

Prints the operators that were wrong, those that CUDA refuses and the CPU does not, and last how many were
compared, how many of those were said to be unknown and how many wrong, and how many samples were left out
because the CPU or CUDA refuses them.
"""

import contextlib
import io
import sys
import types
import unittest
import warnings

import torch
import virtual_gpu_said

warnings.simplefilter("ignore")
sys.modules["expecttest"] = types.ModuleType(
    "expecttest"
)  # which OpInfo's module imports, and does not use here
sys.modules["expecttest"].TestCase = unittest.TestCase
from torch.testing._internal import common_methods_invocations as invocations  # noqa: E402

SAMPLES = 4
NOT_COMPARED = {
    "empty": "its values are nobody's",
    "empty_like": "its values are nobody's",
    "empty_permuted": "its values are nobody's",
    "empty_strided": "its values are nobody's",
    "new_empty": "its values are nobody's",
    "new_empty_strided": "its values are nobody's",
    "bernoulli": "by chance",
    "geometric": "by chance",
    "randint": "by chance",
    "randint_like": "by chance",
    "resize_": "what it adds is nobody's",
    "resize_as_": "what it adds is nobody's",
    "to_sparse": "sparse tensors are not compared",
    "sparse.mm": "sparse tensors are not compared",
    "sparse.sampled_addmm": "sparse tensors are not compared",
}


def mapped(function, value):
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = [mapped(function, each) for each in value]
        return type(value)(items) if type(value) in (list, tuple) else items
    if isinstance(value, dict):
        return {name: mapped(function, each) for name, each in value.items()}
    return function(value) if isinstance(value, torch.device) or value == "cpu" else value


def there(value):
    if isinstance(value, torch.Tensor):
        # not .cuda(): a view of more than its memory stays one
        return value.detach().clone(memory_format=torch.preserve_format).cuda()
    return torch.device("cuda")


def here(value):
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def plain(value):
    if isinstance(value, torch.Tensor):
        return [value.cpu().tolist(), list(value.shape), str(value.dtype)]
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def looked_at(value):
    """What a program would see of it, and whether a sentence says that nobody knows it."""
    virtual_gpu_said.said.clear()
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        seen = plain(value() if callable(value) else value)
    return seen, "virtual GPU:" in said.getvalue()


def same(a, b):
    return repr(a) == repr(b)  # so that nan is nan


def compare(name, function, sample, inplace):
    """None: not to be compared. Else whether it is right, and whether it was said to be unknown."""
    arguments = (sample.input, *sample.args)

    def run(where):
        given = mapped(where, arguments)
        options = mapped(where, sample.kwargs)
        result = function(*given, **options)
        return (given[0], result) if inplace else result

    try:
        expected = plain(run(here))
    except Exception:
        return None  # the CPU refuses it
    try:
        found, said = looked_at(lambda: run(there))
    except Exception as error:
        return (
            "raises",
            str(error).splitlines()[0][:90] if str(error) else repr(error),
            type(error).__name__,
        )
    return (same(found, expected) or said, said and not same(found, expected), (found, expected))


def cases():
    for info in invocations.op_db:
        forms = {"": info.op, "_": info.inplace_variant}
        for dtype in (torch.int64, torch.int32, torch.bool, torch.uint8):
            if dtype not in info.dtypes:
                continue
            torch.manual_seed(0)
            try:
                samples = list(zip(range(SAMPLES * 3), info.sample_inputs("cpu", dtype), strict=False))
            except Exception:
                continue
            for suffix, form in forms.items():
                if form is not None:
                    name = info.name + suffix
                    yield (
                        info.name,
                        f"{name} {info.variant_test_name}".strip(),
                        form,
                        [s for _, s in samples],
                        suffix,
                    )
    lists = [
        db for name, db in vars(invocations).items() if name.startswith("foreach_") and name.endswith("_db")
    ]
    for info in (each for db in lists for each in db):
        yield from foreach(info)


class Sample:
    def __init__(self, first, *rest):
        self.input, self.args, self.kwargs = first, rest, {}


def foreach(info):
    first = lambda: [torch.arange(1, 7).view(2, 3), torch.tensor([4, -2]), torch.tensor(3)]  # noqa: E731
    second = lambda: [torch.full((2, 3), 2), torch.tensor([1, 5]), torch.tensor(1)]  # noqa: E731
    samples = [Sample(first()), Sample(first(), 2), Sample(first(), [1, 2, 3]), Sample(first(), second())]
    samples += [Sample(first(), second(), second()), Sample(first(), torch.tensor(2))]
    samples += [Sample(first(), second(), 2), Sample(first(), second(), second(), 2)]
    for suffix, form in (("", info.method_variant), ("_", info.inplace_variant)):
        if form is not None:
            yield info.name, info.name + suffix, form, samples, suffix


def main(names):
    compared, unknown, wrong, refused, raises = 0, [], {}, 0, {}
    for group, name, form, samples, suffix in cases():
        if group in NOT_COMPARED or (names and group not in names):
            continue
        outcomes = [compare(name, form, sample, bool(suffix)) for sample in samples]
        refused += outcomes.count(None)  # by the CPU
        for each in outcomes:
            if each and each[0] == "raises":
                raises.setdefault(group, []).append(each[1:])
        outcomes = [each for each in outcomes if each and each[0] != "raises"]
        if not outcomes:
            continue
        compared += 1
        unknown += [name] * any(each[1] for each in outcomes)
        bad = [each[2] for each in outcomes if not each[0]]
        if bad:
            wrong.setdefault(name, str(bad[0]))
    for name, what in wrong.items():
        print(name, what[:300])
    print("unknown:", ", ".join(unknown), file=sys.stderr)
    print("raises:", *(f"{name}: {found[0]}" for name, found in raises.items()), sep="\n", file=sys.stderr)
    print("left out:", ", ".join(sorted(raises)))
    print(compared, len(unknown), len(wrong), refused, sum(map(len, raises.values())))


main(sys.argv[1:])
