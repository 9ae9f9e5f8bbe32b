"""The dispatch keys at which values are kept, and where they are in force."""

import threading

import torch

TRANSFORMED = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
"""Within vmap and the other transformations of functions."""
KEYS = {False: "TESTING_ONLY_GenericMode", True: "TESTING_ONLY_GenericWrapper"}
"""By whether what stands there is always in force."""
KEY, OTHER_KEY = (torch._C._dispatch_key_parse(KEYS[always]) for always in (False, True))
BELOW = {
    always: torch._C._dispatch_keyset_full_after(torch._C._dispatch_key_parse(KEYS[always]))
    for always in KEYS
}

_running = threading.local()
"""`operators`: how many run their own code in this thread, one within the other."""


def in_force(call):
    """A dispatch mode, or a tensor that stands for others, calls operators from where the dispatcher leaves
    out all that stands above it: what stands here is put back."""

    def from_within(operator, /, *arguments, **options):
        if not is_excluded(KEY):
            return call(operator, *arguments, **options)
        other = is_excluded(OTHER_KEY)  # not always where the first is: `past`
        exclude(KEY, False), exclude(OTHER_KEY, False)
        try:
            return call(operator, *arguments, **options)
        finally:
            exclude(KEY, True), exclude(OTHER_KEY, other)

    is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
    return from_within


class Engine:
    """The autograd engine, without values while it runs."""

    def __init__(self, engine):
        self._engine = engine
        self.run_backward = switched(engine.run_backward, False)

    def __getattr__(self, name):
        return getattr(self._engine, name)


def switched(function, on):
    def call(*arguments, **options):
        before = torch._C._dispatch_tls_is_dispatch_key_included(KEY)
        torch._C._dispatch_tls_set_dispatch_key_included(KEY, on)
        try:
            return function(*arguments, **options)
        finally:
            torch._C._dispatch_tls_set_dispatch_key_included(KEY, before)

    return call


def with_values_again(init):
    def begin(frame, recompute_fn, *arguments, **options):
        init(frame, switched(recompute_fn, True), *arguments, **options)

    return begin


def call_plainly(function, *arguments, **options):
    return function(*arguments, **options)


def without_any(function, *arguments, **options):
    """`function` without what is always in force either."""
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
    exclude(OTHER_KEY, True)
    try:
        return past(function, *arguments, **options)
    finally:
        exclude(OTHER_KEY, False)


def past(function, *arguments, **options):
    """`function` without what stands here, but for what a dispatch mode calls from within."""
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
    """Whether an operator of this thread is running its own code, and no dispatch mode's within."""
    within = getattr(_running, "operators", 0) > 0
    return within and torch._C._dispatch_tls_is_dispatch_key_excluded(KEY)


def has_a_mode(keys):
    """Whether a dispatch mode, or a tensor that stands for others, is still to be called."""
    return keys.has(torch._C.DispatchKey.Python)
