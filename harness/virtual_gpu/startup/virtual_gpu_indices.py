"""Finds indices past the end of what they look up: a GPU's kernel ends the program for them.

So a vocabulary that is smaller than the tokenizer's is found, or a label of a class that is not there.
"""

from virtual_gpu_said import say_once


def _ignored(arguments):
    """The label that the loss leaves out: nll_loss' argument ignore_index."""
    return arguments[4] if len(arguments) > 4 else -100


LOOKED_UP = {
    "embedding": lambda weight, indices, *rest: (indices, weight.shape[0], None),
    "gather": lambda tensor, dim, index, *rest: (index, tensor.shape[dim] if tensor.dim() else 1, None),
    "index_select": lambda tensor, dim, index, *rest: (index, tensor.shape[dim] if tensor.dim() else 1, None),
    "nll_loss_forward": lambda *all: (all[1], all[0].shape[-1], _ignored(all)),
    "nll_loss2d_forward": lambda *all: (all[1], all[0].shape[1], _ignored(all)),
}
"""By operator, of its arguments: (the tensor of indices, the number of entries that can be looked up, an
index that the operator ignores or None)."""


def check(name, arguments, values_of):
    """Whether the operator `name` is given an index past the end; if so, say it.

    `values_of(tensor)` gives a tensor's values on the host, or None where nobody knows them.
    """
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
