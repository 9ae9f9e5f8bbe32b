"""Indices past the end of what they look up, which a GPU's kernels end the program for.

A vocabulary that is smaller than the tokenizer's, or a label past the classes, is found so.
"""

from virtual_gpu_said import say_once


def _ignored(arguments):
    return arguments[4] if len(arguments) > 4 else -100


LOOKED_UP = {
    "embedding": lambda weight, indices, *rest: (indices, weight.shape[0], None),
    "gather": lambda tensor, dim, index, *rest: (index, tensor.shape[dim] if tensor.dim() else 1, None),
    "index_select": lambda tensor, dim, index, *rest: (index, tensor.shape[dim] if tensor.dim() else 1, None),
    "nll_loss_forward": lambda *all: (all[1], all[0].shape[-1], _ignored(all)),
    "nll_loss2d_forward": lambda *all: (all[1], all[0].shape[1], _ignored(all)),
}
"""By operator: which argument has the indices, how many there are to look up, and which index is left out."""


def check(name, arguments, values_of):
    """Whether an index is past the end, and say it. `values_of` gives a tensor's values, or None where nobody
    knows."""
    indices, count, ignored = LOOKED_UP[name](*arguments)
    values = values_of(indices)
    if values is None or not values.numel():
        return False
    wrong = values[(values < 0) | (values >= count)]
    wrong = wrong if ignored is None else wrong[wrong != ignored]
    if wrong.numel():
        what = "a label" if name.startswith("nll") else "an index"
        say_once(
            "past",
            f"{name} is given {what} of {int(wrong[0])}, and there are {count:,}, from 0 on: a GPU would end "
            "the program here with `CUDA error: device-side assert triggered`.",
        )
    return bool(wrong.numel())
