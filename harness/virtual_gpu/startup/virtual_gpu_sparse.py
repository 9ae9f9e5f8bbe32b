"""Coalescing of sparse tensors: how many entries remain once equal ones are added up. CUDA's kernel counts
them and allocates accordingly, so the number has to be known here."""

import torch
from virtual_gpu_held import answer, can_hold, hold, is_held, values_of
from virtual_gpu_said import say_once


def install(library, key, below, without, off):
    """Register a kernel of `_coalesce` at the dispatch key `key`, which calls the one at the keys `below`.

    `without(function, ...)` runs CUDA's kernel, and `off(function)` is a function on the host, both with the
    key out of force (virtual_gpu_keys.py).
    """
    redispatch = torch.ops.aten._coalesce.default._handle.redispatch_boxed

    def kernel(keys, sparse):
        keys = keys & below
        parts, result = (sparse._indices(), sparse._values()), None
        if not sparse.is_cuda or not parts[0].numel():
            return redispatch(keys, sparse)
        if is_held(parts[0]):
            host = off(torch.sparse_coo_tensor)(*map(values_of, parts), sparse.shape, check_invariants=False)
            result = off(host.coalesce)()
            answer(result.indices().size(1))
        else:
            say_once("coalesce", "nobody knows which entries of a sparse tensor are the same: none are here.")
            answer(parts[0].size(1))
        try:
            output = without(redispatch, keys, sparse)
        finally:
            answer(None)
        if result is not None:
            computed = result.indices(), result.values()
            for given, part, value in zip(
                parts, (output._indices(), output._values()), computed, strict=True
            ):
                if is_held(given) and can_hold(part):
                    off(hold(part).copy_)(value)
        return output

    library.impl("_coalesce", kernel, key, with_keyset=True)
