"""The two dispatch keys at which values are computed (virtual_gpu_values.py), and functions that take them
out of force for a while, or put them back.

Both are keys that PyTorch has for tests. KEYS[False] is in force where Python calls operators; KEYS[True]
always is, and only operators that decide about sizes have a kernel there.
"""

import sys
import threading

import torch

TRANSFORMED = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
"""The key of operators within vmap and the other transformations of functions."""
KEYS = {False: "TESTING_ONLY_GenericMode", True: "TESTING_ONLY_GenericWrapper"}
"""Names of the two keys, by whether kernels there are always in force."""
KEY, OTHER_KEY = (torch._C._dispatch_key_parse(KEYS[always]) for always in (False, True))
BELOW = {
    always: torch._C._dispatch_keyset_full_after(torch._C._dispatch_key_parse(KEYS[always]))
    for always in KEYS
}
"""For each of the two keys, the set of all keys after it."""

_running = threading.local()
"""`operators`: how many operators run their own code in this thread, one within the other."""


def in_force(call):
    """`call`, which calls an operator, with both keys in force.

    A dispatch mode, or a tensor that stands for others, calls operators from a place where the dispatcher
    excludes all keys above its own, and so these two.
    """

    def from_within(operator, /, *arguments, **options):
        if not is_excluded(KEY):
            return call(operator, *arguments, **options)
        other = is_excluded(OTHER_KEY)  # not always where the first key is: see `past`
        exclude(KEY, False), exclude(OTHER_KEY, False)
        try:
            return call(operator, *arguments, **options)
        finally:
            exclude(KEY, True), exclude(OTHER_KEY, other)

    is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
    return from_within


class Engine:
    """The autograd engine, which runs backward with KEY out of force: see virtual_gpu_values.py."""

    def __init__(self, engine):
        self._engine = engine
        self.run_backward = switched(engine.run_backward, False)

    def __getattr__(self, name):
        return getattr(self._engine, name)


def switched(function, on):
    """`function` with KEY in force while it runs (`on`), or out of force."""

    def call(*arguments, **options):
        before = torch._C._dispatch_tls_is_dispatch_key_included(KEY)
        torch._C._dispatch_tls_set_dispatch_key_included(KEY, on)
        try:
            return function(*arguments, **options)
        finally:
            torch._C._dispatch_tls_set_dispatch_key_included(KEY, before)

    return call


def with_values_again(init):
    """`init`, the constructor of a checkpointed block's frame, for blocks that have values when they run
    again within backward."""

    def begin(frame, recompute_fn, *arguments, **options):
        init(frame, switched(recompute_fn, True), *arguments, **options)

    return begin


def compile_without(output_graph):
    """Take the kernels here out of force while a backend of torch.compile runs, which traces operators, and
    have Dynamo compile no function of these modules."""
    from torch._dynamo import trace_rules

    for name in [name for name in sys.modules if name.startswith("virtual_gpu_")]:
        trace_rules.add(name)
    graph = output_graph.OutputGraph
    graph.call_user_compiler = switched(graph.call_user_compiler, False)


def call_plainly(function, *arguments, **options):
    return function(*arguments, **options)


def without_any(function, *arguments, **options):
    """Call `function` with both keys out of force."""
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
    exclude(OTHER_KEY, True)
    try:
        return past(function, *arguments, **options)
    finally:
        exclude(OTHER_KEY, False)


def past(function, *arguments, **options):
    """Call `function` with KEY out of force; a dispatch mode that it calls puts the key back (`in_force`)."""
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
    before = torch._C._dispatch_tls_is_dispatch_key_excluded(KEY)
    exclude(KEY, True)
    _running.operators = getattr(_running, "operators", 0) + 1
    try:
        return function(*arguments, **options)
    finally:
        _running.operators -= 1
        exclude(KEY, before)


def is_within_an_operator():
    """Whether this thread runs the own code of an operator, and not that of a dispatch mode within it."""
    within = getattr(_running, "operators", 0) > 0
    return within and torch._C._dispatch_tls_is_dispatch_key_excluded(KEY)


def has_a_mode(keys):
    """Whether `keys`, those of a call, still have a dispatch mode's, or that of a tensor that stands for
    others: the operator will be called again from there."""
    return keys.has(torch._C.DispatchKey.Python)
