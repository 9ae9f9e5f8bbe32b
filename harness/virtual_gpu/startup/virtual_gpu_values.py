"""True integers and booleans on a device that computes nothing.

The kernel of each operator below runs as ever, and so allocates as ever; then the same operator is computed
on the CPU from the values that are held (virtual_gpu_held.py), and its result written where the kernel would
have. Floats that kernels would have computed are zeros, wherever they are looked at; floats of the host are
held while they are small, and so is what follows from them alone.

The functions here stand at a dispatch key above autograd that nothing else uses, and that is in force where
Python runs the operators. It is not while the autograd engine does: a tensor that Python has seen is referred
to once more, the engine then adds gradients out of place instead of in place, and the peak would be another.
Checkpointed blocks that run again within backward are Python's, and have their values; and what decides about
sizes (COUNTED) stands at another key, which is always in force.
"""

import os
import sys
import traceback
from functools import partial

import torch
import torch.utils.checkpoint
from virtual_gpu_held import answer, can_hold, forget, hold, is_held, is_plain, values_of
from virtual_gpu_operators import (
    ALWAYS_IN_FORCE,
    CHOOSE,
    COUNTED,
    FORGET,
    LEFT_OUT,
    MAKE_INTEGERS,
    OPERATORS,
    OVERWRITE,
    WITH_CHANCE,
)

MOST_WORK = 1 << 24
"""Elements of an argument that has no values, beyond which nothing is computed from it."""

_generator = torch.Generator()
_balanced = os.environ.get("VIRTUAL_GPU_ROUTING") != "worst"
_said = set()
_libraries = []


KEYS = {False: "TESTING_ONLY_GenericMode", True: "TESTING_ONLY_GenericWrapper"}
"""By whether what stands there is always in force."""
_key, _other_key = (torch._C._dispatch_key_parse(KEYS[always]) for always in (False, True))
BELOW = {
    always: torch._C._dispatch_keyset_full_after(torch._C._dispatch_key_parse(KEYS[always]))
    for always in KEYS
}


def install():
    """Stand in front of the kernels. To be called once, after torch is imported."""
    everything, library = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _libraries.extend((everything, library))  # what is registered goes with them
    for key in KEYS.values():
        everything.fallback(torch.library.fallthrough_kernel, key)
    with_kernel = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    for name in [*with_kernel, "aten::copy_"]:
        base, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and base in (*OPERATORS, *FORGET) and name not in LEFT_OUT:
            operator = getattr(getattr(torch.ops.aten, base), overload or "default")
            always = base in ALWAYS_IN_FORCE
            library.impl(
                name[len("aten::") :],
                _kernel(base, operator, BELOW[always]),
                KEYS[always],
                with_keyset=True,
            )
    overloads = type(torch.ops.aten.add.Tensor)
    overloads.__call__ = _in_force(overloads.__call__)
    torch.autograd.Variable._execution_engine = _Engine(torch.autograd.Variable._execution_engine)
    frame = torch.utils.checkpoint._CheckpointFrame
    frame.__init__ = _with_values_again(frame.__init__)
    reentrant = torch.utils.checkpoint.CheckpointFunction
    reentrant.backward = staticmethod(switched(reentrant.backward, True))
    for key in KEYS.values():
        torch._C._dispatch_tls_set_dispatch_key_included(torch._C._dispatch_key_parse(key), True)


def compile_without(output_graph):
    """torch.compile's backends trace what they compile: nothing may stand in front of it then."""
    graph = output_graph.OutputGraph
    graph.call_user_compiler = switched(graph.call_user_compiler, False)


def _in_force(call):
    """A dispatch mode, or a tensor that stands for others, calls operators from where the dispatcher leaves
    out all that stands above it: what stands here is put back."""

    def from_within(operator, /, *arguments, **options):
        if not is_excluded(_key):
            return call(operator, *arguments, **options)
        exclude(_key, False), exclude(_other_key, False)
        try:
            return call(operator, *arguments, **options)
        finally:
            exclude(_key, True), exclude(_other_key, True)

    is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
    return from_within


class _Engine:
    """The autograd engine, without values while it runs."""

    def __init__(self, engine):
        self._engine = engine
        self.run_backward = switched(engine.run_backward, False)

    def __getattr__(self, name):
        return getattr(self._engine, name)


def switched(function, on):
    def call(*arguments, **options):
        before = torch._C._dispatch_tls_is_dispatch_key_included(_key)
        torch._C._dispatch_tls_set_dispatch_key_included(_key, on)
        try:
            return function(*arguments, **options)
        finally:
            torch._C._dispatch_tls_set_dispatch_key_included(_key, before)

    return call


def _with_values_again(init):
    def begin(frame, recompute_fn, *arguments, **options):
        init(frame, switched(recompute_fn, True), *arguments, **options)

    return begin


def _kernel(base, operator, below):
    redispatch = operator._handle.redispatch_boxed
    if base in FORGET:
        return lambda keys, *arguments, **options: _forgotten(redispatch(keys & below, *arguments, **options))
    if base == "_local_scalar_dense":
        return lambda keys, tensor: _read_one(keys, tensor, redispatch(keys & below, tensor))
    if base == "copy_":
        return lambda keys, to, source, *how: _copied(redispatch, keys & below, to, source, *how)
    is_new = not any(argument.alias_info for argument in operator._schema.arguments)
    packet = getattr(torch.ops.aten, base)
    places = [n for n, argument in enumerate(operator._schema.arguments) if str(argument.type) == "Tensor"]
    always, counted, chance = base in MAKE_INTEGERS + list(OVERWRITE), base in COUNTED, base in WITH_CHANCE

    def kernel(keys, *arguments, **options):
        tensors = _tensors_in(arguments)
        if options:
            tensors += _tensors_in(options.values())
        for place in places:
            if place < len(arguments) and type(arguments[place]) in (int, float, bool):
                run, on_host = partial(_with_numbers, packet, places, redispatch), packet
                break
        else:
            run, on_host = redispatch, operator
        keys = keys & below
        if has_a_mode(keys):  # which calls the operator again, from within
            return run(keys, *arguments, **options)
        for tensor in tensors:
            if is_plain(tensor) and (always or not tensor.is_floating_point() or is_held(tensor)):
                break
        else:
            return run(keys, *arguments, **options)
        if counted:
            return _count(operator, redispatch, keys, arguments, options)
        made = run(keys, *arguments, **options)
        if chance:
            options = {**options, "generator": _generator}
        follow = partial(_follow, base, on_host, is_new, arguments, options, tensors, made)
        _compute(base, follow, writes=() if is_new else _tensors_in((made,)))
        return made

    return kernel


def _compute(name, function, *arguments, writes=()):
    """`function`, for the operator `name`, on the CPU, where operators are themselves again. None if the CPU
    refuses what a kernel might not have noticed; the first time, that is said. Then nobody knows what
    `writes` have."""
    try:
        with torch.no_grad():
            return switched(function, False)(*arguments)
    except (RuntimeError, IndexError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        _say_once(
            "refused",
            f"the CPU refuses {name} of the values here ({reason}): what it would have written is not known. "
            "A kernel would have failed, or written something.",
        )
        _forgotten(writes)
        return None


def _forgotten(tensors):
    for tensor in _tensors_in((tensors,)):
        if is_plain(tensor):
            forget(tensor)
    return tensors


def _with_numbers(packet, places, redispatch, keys, *arguments, **options):
    """A Python number that stands for a tensor comes here as a number, and no kernel takes it so. The
    operator's other form does, which makes it a tensor again."""
    try:
        return _past(packet, *arguments, **options)
    except (RuntimeError, TypeError):
        made = list(arguments)
        other = next(argument for argument in arguments if isinstance(argument, torch.Tensor))
        for place in places:
            if place < len(made) and type(made[place]) in (int, float, bool):
                made[place] = torch.tensor(made[place], dtype=torch.result_type(other, made[place]))
        return redispatch(keys, *made, **options)


def _past(function, *arguments, **options):
    """`function` without what stands here, but for what a dispatch mode calls from within."""
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
    before = torch._C._dispatch_tls_is_dispatch_key_excluded(_key)
    exclude(_key, True), exclude(_other_key, True)
    try:
        return function(*arguments, **options)
    finally:
        exclude(_key, before), exclude(_other_key, before)


def _follow(base, operator, is_new, arguments, options, tensors, made):
    """Compute on the CPU what the kernel would have, and write it where `made` lies."""
    results = _tensors_in((made,))
    unknown = [tensor for tensor in tensors[base in OVERWRITE :] if not (tensor.is_cpu or is_held(tensor))]
    known = not unknown
    wanted = [result for result in results if _is_wanted(result, known, is_new)]
    if not wanted:
        return
    if base in CHOOSE and unknown:
        among = arguments[0].size(_dim_of(base, arguments, options))
        for result in wanted:
            if not result.is_floating_point():
                period = among if _balanced else arguments[1] if base == "topk" else 1
                _write(result, (torch.arange(result.numel()) % max(period, 1)).view(result.shape))
        return
    if any(tensor.numel() > MOST_WORK for tensor in unknown):
        for result in wanted:
            if is_new:
                _write(result, torch.tensor(base == "all"))
        return
    if base == "all" and not known and not tensors[0].is_floating_point():
        _write(wanted[0], torch.tensor(True))  # of a mask too large to keep
        return
    if not is_new:
        for result in wanted:
            hold(result)
    host = [_on_host(argument) for argument in arguments]
    host_options = {name: _on_host(option) for name, option in options.items()}
    computed = _tensors_in((operator(*host, **host_options),))
    if is_new:
        for result, value in zip(results, computed, strict=True):
            if _is_wanted(result, known, is_new):
                _write(result, value)


def _is_wanted(result, known, is_new):
    if not is_plain(result):
        return False
    if result.is_floating_point() or result.is_complex():
        return (known if is_new else known or is_held(result)) and can_hold(result)
    return can_hold(result)


def _count(operator, redispatch, keys, arguments, options):
    """Operators whose kernels count first: they are told the number."""

    def compute():
        host = [_on_host(argument) for argument in arguments]
        return _tensors_in((operator(*host, **{name: _on_host(option) for name, option in options.items()}),))

    unknown = [tensor for tensor in _tensors_in(arguments) if not (tensor.is_cpu or is_held(tensor))]
    too_much = any(tensor.numel() > MOST_WORK for tensor in unknown)
    values = None if too_much else _compute(operator.__name__, compute)
    if values is None:
        return redispatch(keys, *arguments, **options)
    along = arguments[1] if operator.__name__.startswith("unique_dim") else 0
    answer(values[0].size(along))
    try:
        made = _past(redispatch, keys, *arguments, **options)  # which reads what it is told
    finally:
        answer(None)
    for result, value in zip(_tensors_in((made,)), values, strict=True):
        if result.shape == value.shape and can_hold(result):
            _compute(operator.__name__, _write, result, value)
    return made


def _write(result, value):
    view = hold(result)
    if view is not None:
        view.copy_(value)


def _dim_of(base, arguments, options):
    place = 2 if base == "topk" else 1
    dim = arguments[place] if len(arguments) > place else options.get("dim", -1)
    return -1 if dim is None else dim


def _copied(redispatch, keys, to, source, *how):
    if not isinstance(source, torch.Tensor):
        source = torch.tensor(source, dtype=to.dtype)
    made = redispatch(keys, to, source, *how)
    if has_a_mode(keys):
        return made
    if is_plain(source):
        known = is_held(source)
        if to.is_cpu:
            if known:
                _compute("copy_", to.copy_, values_of(source))
            elif to.numel() == 1:
                _tell()
        elif is_plain(to) and ((known and can_hold(to)) or is_held(to)):
            _compute("copy_", _write, to, values_of(source), writes=(to,))
    elif is_plain(to) and source.is_cpu and can_hold(to):
        _compute("copy_", _write, to, source)
    return made


def _read_one(keys, tensor, read):
    if has_a_mode(keys) or not is_plain(tensor):
        return read
    if is_held(tensor):
        return switched(values_of(tensor).item, False)()
    _tell()
    return read


def _tell():
    """Once: that a value is looked at that nobody knows, and where."""
    if "read" in _said:
        return
    lines = traceback.extract_stack()
    ours = [f for f in lines if "site-packages" not in f.filename and "virtual_gpu_" not in f.filename]
    where = (ours or lines)[-1]
    line = (where.line or "").strip()
    _say_once(
        "read",
        f"{where.filename}:{where.lineno} reads a value that no kernel computed: it is 0 ({line}).",
    )


def _say_once(topic, sentence):
    if topic not in _said:
        _said.add(topic)
        print(f"virtual GPU: {sentence} This is said once.", file=sys.stderr)


def _on_host(argument):
    if isinstance(argument, torch.Tensor):
        return values_of(argument) if argument.is_cuda else argument
    if isinstance(argument, torch.device):
        return torch.device("cpu") if argument.type == "cuda" else argument
    if isinstance(argument, (list, tuple)):
        return [_on_host(each) for each in argument]
    return argument


def has_a_mode(keys):
    """Whether a dispatch mode, or a tensor that stands for others, is still to be called."""
    return keys.has(torch._C.DispatchKey.Python)


def _tensors_in(values):
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors_in(value)
    return found
