"""How many entries a sparse tensor has once equal ones are put together: its kernel counts, and allocates."""

import torch
from virtual_gpu_held import answer, can_hold, hold, is_held, values_of
from virtual_gpu_said import say_once


def install(library, key, below, without, off):
    """Stand in front of `_coalesce`, which is a sparse tensor's alone. `without` runs a kernel, `off` a
    function on the host, where nothing stands in front of operators."""
    redispatch = torch.ops.aten._coalesce.default._handle.redispatch_boxed

    def kernel(keys, sparse):
        keys = keys & below
        parts, found = (sparse._indices(), sparse._values()), None
        if not sparse.is_cuda or not parts[0].numel():
            return redispatch(keys, sparse)
        if is_held(parts[0]):
            found = off(torch.sparse_coo_tensor)(*map(values_of, parts), sparse.shape, check_invariants=False)
            found = off(found.coalesce)()
            answer(found.indices().size(1))
        else:
            say_once("coalesce", "nobody knows which entries of a sparse tensor are the same: none are here.")
            answer(parts[0].size(1))
        try:
            made = without(redispatch, keys, sparse)
        finally:
            answer(None)
        if found is not None:
            computed = found.indices(), found.values()
            for given, part, value in zip(parts, (made._indices(), made._values()), computed, strict=True):
                if is_held(given) and can_hold(part):
                    off(hold(part).copy_)(value)
        return made

    library.impl("_coalesce", kernel, key, with_keyset=True)
