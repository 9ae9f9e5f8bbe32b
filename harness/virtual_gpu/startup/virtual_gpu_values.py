"""True integers and booleans on a device that computes nothing.

The kernel of every operator runs as ever, and so allocates as ever. Then, if the values of all its arguments
are known, the same operator is computed on the CPU from the values that are held (virtual_gpu_held.py), and
the result is written where the kernel would have written it. Otherwise the result is unknown, and a program
that reads it is warned. Floats that kernels would have computed are taken for zeros, so integers that follow
from them have values. Small floats of the host are held, and so is what follows from them alone, except for
matrix products and random numbers.

The functions here are kernels at a dispatch key above autograd that nothing else uses, and that is in force
where Python calls the operators. It is not where the autograd engine does: a tensor that Python has seen has
one more reference, the engine would add gradients out of place instead of in place, and the peak would be
another. Checkpointed blocks that run again within backward are called by Python, and have values; and
operators that decide about sizes (ALWAYS_IN_FORCE) have kernels at another key, which is always in force.
"""

import os
from functools import partial

import torch
import torch.utils.checkpoint
import virtual_gpu_sparse
from virtual_gpu_held import (
    answer,
    assume,
    can_hold,
    forget,
    hold,
    is_assumed,
    is_held,
    is_of_floats,
    is_plain,
    presume,
    presumed,
    values_of,
)
from virtual_gpu_indices import LOOKED_UP, check
from virtual_gpu_keys import (
    BELOW,
    KEY,
    KEYS,
    OTHER_KEY,
    TRANSFORMED,
    Engine,
    call_plainly,
    has_a_mode,
    in_force,
    is_within_an_operator,
    past,
    switched,
    with_values_again,
    without_any,
)
from virtual_gpu_operators import ALWAYS_IN_FORCE, CHOOSE, MAKE_INTEGERS, OF_NO_VALUES, Operator, tensors_in
from virtual_gpu_own_time import not_the_programs, now
from virtual_gpu_said import is_looked_at, say_once, tell

MOST_WORK = 1 << 24
"""The most elements of an unknown argument: nothing is computed from the zeros of a larger one."""

_generator = torch.Generator()
_balanced = os.environ.get("VIRTUAL_GPU_ROUTING") != "worst"
_libraries = []  # what they register ends with them


def install():
    """Register kernels in front of CUDA's. To be called once, after torch is imported."""
    everything, library = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _libraries.extend((everything, library))
    for key in KEYS.values():
        everything.fallback(torch.library.fallthrough_kernel, key)
    for name in [*torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"), "aten::copy_"]:
        base, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and _writes_values(name, base, overload):
            always = base in ALWAYS_IN_FORCE
            kernel = _once_called(base, overload or "default", BELOW[always])
            library.impl(name.removeprefix("aten::"), kernel, KEYS[always], with_keyset=True)
    virtual_gpu_sparse.install(library, KEYS[False], BELOW[False], past, partial(switched, on=False))
    for key in (KEY, OTHER_KEY):  # higher-order operators, as flex_attention, are made of others
        torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)
        for operator in torch._ops._higher_order_ops.values():
            operator.fallthrough(key)
    overloads = type(torch.ops.aten.add.Tensor)
    overloads.__call__ = in_force(overloads.__call__)
    torch.autograd.Variable._execution_engine = Engine(torch.autograd.Variable._execution_engine)
    frame = torch.utils.checkpoint._CheckpointFrame
    frame.__init__ = with_values_again(frame.__init__)
    reentrant = torch.utils.checkpoint.CheckpointFunction
    reentrant.backward = staticmethod(switched(reentrant.backward, True))
    for key in KEYS.values():
        torch._C._dispatch_tls_set_dispatch_key_included(torch._C._dispatch_key_parse(key), True)


def _writes_values(name, base, overload):
    if base in OF_NO_VALUES or base.startswith(("empty", "_empty")):
        return False
    returns = torch._C._get_schema("aten::" + base, overload).returns
    return not any(each.alias_info and not each.alias_info.is_write for each in returns)  # as a view's


def _once_called(base, overload, below):
    """A kernel that is made at an operator's first call: a program calls few of all operators."""
    kernel = None

    def call(keys, *arguments, **options):
        nonlocal kernel
        if kernel is None:
            kernel = _kernel(base, getattr(getattr(torch.ops.aten, base), overload), below)
        return kernel(keys, *arguments, **options)

    return call


def _kernel(base, operator, below):
    """A kernel in front of `operator`'s own, which is the one at the dispatch keys `below`."""
    redispatch = operator._handle.redispatch_boxed
    if base == "_local_scalar_dense":
        return lambda keys, tensor: _read_one(keys, tensor, redispatch(keys & below, tensor))
    if base == "copy_":
        return lambda keys, to, source, *how: _copied(redispatch, keys & below, to, source, *how)
    if base == "resize_":
        return lambda keys, tensor, *how, **named: _resized(redispatch, keys & below, tensor, *how, **named)
    what = Operator(operator, base)
    # operators that the kernel calls are not followed themselves, except where it reads their values
    without = without_any if what.gives_number else call_plainly if base in ALWAYS_IN_FORCE else past

    def kernel(keys, *arguments, **options):
        began = now()
        run, on_host = redispatch, operator
        for place in what.places:
            if place < len(arguments) and type(arguments[place]) in (int, float, bool, complex):
                run, on_host = partial(_with_numbers, what.packet, what.places, redispatch), what.packet
                break
        keys = keys & below
        if has_a_mode(keys) or keys.has(TRANSFORMED):  # it will call the operator again
            return run(keys, *arguments, **options)
        if what.is_counted and any(tensor.is_cuda for tensor in tensors_in(arguments)):
            return _count(operator, redispatch, keys, arguments, options)
        asked = now()
        outputs = without(run, keys, *arguments, **options)
        done = now()
        if not what.leaves_unknown(arguments, outputs):
            outputs = _followed(what, on_host, arguments, options, outputs)
        not_the_programs(asked - began + now() - done)
        return outputs

    return kernel


def _followed(what, on_host, arguments, options, outputs):
    """Give the results of an operator the values that its kernel would have written, or note that they are
    unknown. `on_host` is the operator on the CPU, and `outputs` what the kernel returned. What to return."""
    results = tensors_in((outputs,)) if what.is_new else what.writes(arguments, options)
    _forgotten(arguments[what.unsaid])
    plain = [result for result in results if result.numel() and is_plain(result)]
    if not plain and not what.gives_number:
        return outputs
    reads = what.reads(arguments, options)
    if what.base == "where":
        reads = compute("where", what.reads_of_sides, arguments, _values_if_known)
    unknown = [tensor for tensor in reads if tensor.numel() and not _is_known(tensor)]
    if what.base in LOOKED_UP and compute(what.base, check, what.base, arguments, _values_if_known):
        _forgotten(plain)
        return outputs
    if what.gives_number:
        if not any(tensor.is_cuda for tensor in reads):
            return outputs
        if unknown:
            tell(outputs)
            return outputs
        computed = compute(what.base, lambda: on_host(*map(_on_host, arguments)))
        return outputs if computed is None else computed
    if any(not is_of_floats(tensor) and not is_assumed(tensor) for tensor in unknown):
        _forgotten(plain)
        if what.base == "all":
            presume(plain[0])
    elif unknown:
        _assumed(what, on_host, arguments, options, plain, unknown)
    else:
        _known(what, on_host, arguments, options, plain, outputs)
    return outputs


def _is_known(tensor):
    return tensor.is_cpu or (is_plain(tensor) and is_held(tensor))


def _values_if_known(tensor):
    return _on_host(tensor) if tensor.numel() and _is_known(tensor) else None


def _known(what, on_host, arguments, options, plain, outputs):
    """Write the values of `plain`, the results on the device, where all arguments are known."""
    floats_too = what.makes_floats
    held = [result for result in plain if (floats_too or not is_of_floats(result)) and can_hold(result)]
    if not held or not what.is_computed:
        _forgotten(plain)
        return
    if len(held) < len(plain):
        if not what.is_new:
            _forgotten(plain)
            return
        _forgotten([result for result in plain if not any(result is each for each in held)])
    if what.has_chance:
        options = {**options, "generator": _generator}
    compute(what.base, _write_what_follows, what, on_host, arguments, options, held, outputs, writes=plain)


def _assumed(what, on_host, arguments, options, plain, unknown):
    """Write the integers among `plain`, where the `unknown` arguments are floats that only kernels would have
    computed, or follow from such floats: these are taken for zeros."""
    base = what.base
    _forgotten([result for result in plain if is_of_floats(result)])
    integers = [result for result in plain if not is_of_floats(result)]
    held = []
    for result in integers:
        if what.is_computed and can_hold(result):
            held.append(result)
        else:  # as the mask of dropout, which nobody looks at
            assume(result)
    if not held:
        return
    if base in CHOOSE:
        among = arguments[0].size(what.dim(arguments, options))
        for result in held:
            period = among if _balanced else arguments[1] if base == "topk" else 1
            _write(result, (torch.arange(result.numel()) % max(period, 1)).view(result.shape))
    elif base == "all" and not is_of_floats(unknown[0]):
        _write(held[0], torch.tensor(True))  # `all` of a mask that is too large to hold
    elif base not in MAKE_INTEGERS or any(tensor.numel() > MOST_WORK for tensor in unknown):
        for result in held:
            _write(result, torch.tensor(base == "all"))
    else:
        compute(base, _write_what_follows, what, on_host, arguments, options, held, plain, writes=held)


def _write_what_follows(what, on_host, arguments, options, held, outputs):
    """Compute on the CPU what the kernel would have computed, and write it to the `outputs` in `held`."""
    if not what.is_new:
        for result in held:
            hold(result)
    computed = _computed(on_host, arguments, options)
    if what.is_new:
        for result, value in zip(tensors_in((outputs,)), computed, strict=True):
            if any(result is each for each in held):
                _write(result, value)


def _computed(operator, arguments, options):
    host = [_on_host(argument) for argument in arguments]
    return tensors_in((operator(*host, **{name: _on_host(option) for name, option in options.items()}),))


def compute(name, function, *arguments, writes=()):
    """What `function` returns, with the kernels here out of force, for the operator `name` on the CPU.

    None if the CPU refuses what a kernel might not have noticed, which is said once. The values of `writes`
    are unknown then."""
    try:
        with torch.no_grad():
            return switched(function, False)(*arguments)
    except NotImplementedError:  # only CUDA has it
        _forgotten(writes)
        return None
    except (RuntimeError, IndexError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        say_once(
            "refused",
            f"the CPU refuses {name} of the values here ({reason}): what it would have written is not known. "
            "A kernel would have failed, or written something.",
        )
        _forgotten(writes)
        return None


def _forgotten(tensors):
    """Note that nobody knows the values of `tensors`, as far as they are on the device."""
    for tensor in tensors_in((tensors,)):
        if is_plain(tensor):
            forget(tensor)


def _with_numbers(packet, places, redispatch, keys, *arguments, **options):
    """Call an operator that was given a Python number in a tensor's place, which no kernel takes: by its
    packet, whose overload for numbers makes it a tensor, or else with tensors made here."""
    if not keys.has(TRANSFORMED):
        try:
            return past(packet, *arguments, **options)
        except (RuntimeError, TypeError):
            pass
    tensors = list(arguments)
    other = next(argument for argument in arguments if isinstance(argument, torch.Tensor))
    for place in places:
        if place < len(tensors) and type(tensors[place]) in (int, float, bool, complex):
            tensors[place] = torch.tensor(tensors[place], dtype=torch.result_type(other, tensors[place]))
    return redispatch(keys, *tensors, **options)


def _count(operator, redispatch, keys, arguments, options):
    """Call an operator of COUNTED: its kernel reads from the device the count that was computed here."""
    unknown = [tensor for tensor in tensors_in(arguments) if not (tensor.is_cpu or is_held(tensor))]
    too_much = any(tensor.numel() > MOST_WORK for tensor in unknown)
    if any(is_plain(each) and not is_of_floats(each) and not is_assumed(each) for each in unknown):
        tell()
    values = None if too_much else compute(operator.__name__, _computed, operator, arguments, options)
    if values is None:
        return redispatch(keys, *arguments, **options)
    along = arguments[1] if operator.__name__.startswith("unique_dim") else 0
    answer(values[0].size(along))
    try:
        outputs = without_any(redispatch, keys, *arguments, **options)
    finally:
        answer(None)
    for result, value in zip(outputs if isinstance(outputs, tuple) else (outputs,), values, strict=True):
        if result is not None and result.shape == value.shape and can_hold(result):  # None: not requested
            compute(operator.__name__, _write, result, value)
    return outputs


def _write(result, value):
    view = hold(result)
    if view is not None:
        view.copy_(value)


def _resized(redispatch, keys, tensor, *how, **named):
    """`resize_`: the old values stay, wherever the memory lies afterwards; added ones are unknown."""
    old = None
    is_known = not has_a_mode(keys) and is_plain(tensor) and tensor.numel() and is_held(tensor)
    if is_known and tensor.is_contiguous():
        old = values_of(tensor).as_strided((tensor.numel(),), (1,)).clone()
    output = redispatch(keys, tensor, *how, **named)
    if old is not None and not is_held(tensor) and can_hold(tensor):
        compute("resize_", lambda: hold(tensor).view(-1)[: len(old)].copy_(old[: tensor.numel()]))
    return output


def _copied(redispatch, keys, to, source, *how):
    if not isinstance(source, torch.Tensor):
        source = torch.tensor(source, dtype=to.dtype)
    output = redispatch(keys, to, source, *how)
    if has_a_mode(keys):
        return output
    if is_plain(source):
        _copied_from_the_device(to, source)
    elif is_plain(to) and source.is_cpu:
        written(to, source)
    return output


def written(to, values):
    """Give `to` these values of the host, or note that its values are unknown if it cannot be held."""
    if can_hold(to, sent=True):
        compute("copy_", _write, to, values, writes=(to,))
    else:
        forget(to)


def _copied_from_the_device(to, source):
    if is_held(source):
        if to.is_cpu:
            compute("copy_", to.copy_, values_of(source))
        elif is_plain(to):
            written(to, values_of(source))
    elif to.is_cpu:
        if source.numel() == 1 or is_looked_at(to, source):
            tell(presumed(source))
            switched(to.fill_, False)(presumed(source))
    elif is_plain(to):
        if is_of_floats(to) or not (is_of_floats(source) or is_assumed(source)):
            forget(to)
        elif can_hold(to):
            _write(to, torch.zeros((), dtype=to.dtype))
        else:
            assume(to)


def _read_one(keys, tensor, read):
    if has_a_mode(keys) or not is_plain(tensor):
        return read
    if is_held(tensor):
        return switched(values_of(tensor).item, False)()
    if tensor.dtype == torch.bool and is_within_an_operator():
        return True  # the operator checks an argument, and nothing is known to be wrong with it
    tell(presumed(tensor))
    return type(read)(presumed(tensor))


def _on_host(argument):
    if isinstance(argument, torch.Tensor):
        return values_of(argument) if argument.is_cuda else argument
    if isinstance(argument, torch.device):
        return torch.device("cpu") if argument.type == "cuda" else argument
    if isinstance(argument, (list, tuple)):
        return [_on_host(each) for each in argument]
    return argument
