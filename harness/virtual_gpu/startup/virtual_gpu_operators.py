"""How some operators differ from the others in what is known of their values on the virtual GPU, by name."""

import torch


def _words(text):
    return text.split()


MAKE_INTEGERS = _words("""
    eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isposinf isneginf isin any all
    argmax argmin count_nonzero sort topk kthvalue max min mode median _cummax_helper _cummin_helper
    searchsorted bucketize nonzero _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive
""")
"""Integers and booleans of floats: those that kernels would have computed are taken for zeros."""
COUNTED = ("nonzero", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive")
"""Their kernels copy to the host how many there are, and allocate accordingly."""
GIVE_NUMBERS = ("equal",)
"""To Python, by values: others that do so go by shapes."""
ALWAYS_IN_FORCE = (*COUNTED, "_local_scalar_dense", "repeat_interleave", "bincount")
CHOOSE = ("topk", "argmax")
"""Of scores that no kernel computed, as a router's, any choice is as good: by default, a balanced one."""
OVERWRITE = {
    **dict.fromkeys(
        _words("""
            fill_ zero_ random_ bernoulli_ geometric_ uniform_ normal_ log_normal_ cauchy_ exponential_
            _foreach_zero_ _foreach_copy_
        """),
        (0, 1),
    ),
    "_cummax_helper": (1, 3),
    "_cummin_helper": (1, 3),
}
"""The first of the arguments that they write into, whatever was there before, and the one after the last."""
PRODUCTS = _words("""
    mm bmm addmm addmm_ addmv addmv_ baddbmm baddbmm_ addbmm addbmm_ mv dot vdot _addmm_activation
    _cdist_forward embedding _embedding_bag embedding_renorm_ renorm renorm_
    conv_depthwise2d conv_depthwise3d im2col col2im
""")
"""The work of layers: their floats are not computed here, of nothing."""
NEVER_COMPUTED = ("_fused_dropout", "native_dropout", "rrelu_with_noise", "rrelu_with_noise_")
"""By chance, with no generator to give."""
WRITE_UNSAID = {"cudnn_batch_norm": slice(3, 5), "native_batch_norm": slice(3, 5)}
"""Arguments that are written into though the schema does not say so: running statistics."""
OF_NO_VALUES = _words("""
    set_ resize_as_ record_stream is_pinned _pin_memory
    _amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_
""")
"""They write no values; those of a gradient scaler write none where nothing is infinite, and nothing is."""


class Operator:
    """What has to be known of an operator to follow it."""

    def __init__(self, operator, base):
        given = operator._schema.arguments
        self.base, self.packet = base, operator.overloadpacket
        self.is_counted = base in COUNTED
        self.gives_number = base in GIVE_NUMBERS
        self.places = [n for n, argument in enumerate(given) if str(argument.type) == "Tensor"]
        self.written = [
            (n, argument.name)
            for n, argument in enumerate(given)
            if argument.alias_info and argument.alias_info.is_write
        ]
        self.is_new = not self.written
        self.only_written = {given[n].name for n, _ in self.written if given[n].kwarg_only}
        self.overwritten = range(*OVERWRITE.get(base, (0, 0)))
        self.has_chance = any(argument.name == "generator" for argument in given)
        self.makes_floats = not self.has_chance and base not in PRODUCTS
        self.is_computed = base not in NEVER_COMPUTED
        self.unsaid = WRITE_UNSAID.get(base, slice(0, 0))

    def writes(self, arguments, options):
        """The tensors that it writes into, of those that it is given."""
        return tensors_in(
            arguments[place] if place < len(arguments) else options.get(name) for place, name in self.written
        )

    def reads(self, arguments, options):
        """The tensors whose values have a say in the result."""
        read = tensors_in(given for n, given in enumerate(arguments) if n not in self.overwritten)
        return read + tensors_in(given for name, given in options.items() if name not in self.only_written)

    def reads_of_sides(self, arguments, values_of):
        """The same of `where`: a side from which it takes nothing has no say. `values_of` gives a tensor's
        values, or None where nobody knows."""
        condition, *sides = arguments
        values = values_of(condition)
        if values is None:
            return arguments
        taken = values.any(), not values.all()
        return [condition, *(side for side, is_taken in zip(sides, taken, strict=True) if is_taken)]

    def dim(self, arguments, options):
        """Along which an operator of CHOOSE chooses."""
        place = 2 if self.base == "topk" else 1
        dim = arguments[place] if len(arguments) > place else options.get("dim", -1)
        return -1 if dim is None else dim


def tensors_in(values):
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found
