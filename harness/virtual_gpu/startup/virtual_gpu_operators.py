"""What has to be known of PyTorch's operators to follow their values on the virtual GPU: lists of those that
differ from most, by name, and what the schema of each says."""

import torch
from virtual_gpu_held import is_held
from virtual_gpu_indices import LOOKED_UP


def _words(text):
    return text.split()


MAKE_INTEGERS = _words("""
    eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isposinf isneginf isin any all
    argmax argmin count_nonzero sort topk kthvalue max min mode median _cummax_helper _cummin_helper
    searchsorted bucketize nonzero _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive
""")
"""Operators that make integers or booleans of floats. Floats that only a kernel would have computed are taken
for zeros, and so the integers that follow from them."""
COUNTED = ("nonzero", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive")
"""Operators whose kernels count entries, copy the number to the host, and allocate accordingly."""
GIVE_NUMBERS = ("equal",)
"""Operators that give Python a number that depends on values. Others that give numbers go by shapes."""
ALWAYS_IN_FORCE = (*COUNTED, "_local_scalar_dense", "repeat_interleave", "bincount")
"""Operators that decide about sizes: their values are followed in backward too."""
CHOOSE = ("topk", "argmax")
"""Operators that choose the largest scores. Where no kernel computed the scores, as a router's, any choice is
as good as another: VIRTUAL_GPU_ROUTING says which is made."""
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
"""By operator: the places of arguments that it writes into, whatever was there before, as the first place and
the one after the last."""
PRODUCTS = _words("""
    mm bmm addmm addmm_ addmv addmv_ baddbmm baddbmm_ addbmm addbmm_ mv dot vdot _addmm_activation
    _cdist_forward embedding _embedding_bag embedding_renorm_ renorm renorm_
    conv_depthwise2d conv_depthwise3d im2col col2im
""")
"""The products that are most of a layer's work. Their floats are never computed here."""
NEVER_COMPUTED = ("_fused_dropout", "native_dropout", "rrelu_with_noise", "rrelu_with_noise_")
"""Random operators without a generator: computing them would change the program's random numbers."""
WRITE_UNSAID = {"cudnn_batch_norm": slice(3, 5), "native_batch_norm": slice(3, 5)}
"""By operator: places of arguments (running statistics) that it writes though its schema hides it."""
OF_NO_VALUES = _words("""
    set_ resize_as_ record_stream is_pinned _pin_memory
    _amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_
""")
"""Operators that write no values. GradScaler's write none where nothing is infinite, as is the case here."""


class Operator:
    """An overload of an operator, with all that has to be known of it to follow its values."""

    def __init__(self, operator, base):
        """`base`: the operator's name without its overload, as "add_"."""
        parameters = operator._schema.arguments
        self.base, self.packet = base, operator.overloadpacket
        self.is_counted = base in COUNTED
        self.gives_number = base in GIVE_NUMBERS
        self.places = [n for n, parameter in enumerate(parameters) if str(parameter.type) == "Tensor"]
        """Places of the arguments that are one tensor."""
        self.written = [
            (n, parameter.name)
            for n, parameter in enumerate(parameters)
            if parameter.alias_info and parameter.alias_info.is_write
        ]
        """Place and name of each argument that is written into."""
        self.is_new = not self.written
        """Whether it returns new tensors instead of writing into those that it is given."""
        self.only_written = {parameters[n].name for n, _ in self.written if parameters[n].kwarg_only}
        self.overwritten = range(*OVERWRITE.get(base, (0, 0)))
        self.has_chance = any(parameter.name == "generator" for parameter in parameters)
        """Whether it draws random numbers."""
        self.makes_floats = not self.has_chance and base not in PRODUCTS
        """Whether the floats of its result are computed here."""
        self.is_computed = base not in NEVER_COMPUTED
        self.unsaid = WRITE_UNSAID.get(base, slice(0, 0))
        self._only_makes = (
            self.is_new and not self.gives_number and base not in (*WRITE_UNSAID, *LOOKED_UP, "where")
        )
        """Whether nothing is to be done but to give its results their values, where all it reads is known."""

    def leaves_unknown(self, arguments, output):
        """Whether it can be seen at once that `output` is a new tensor of floats which nobody knows, so that
        there is nothing to write or to note: this is so of most calls."""
        if not (self._only_makes and isinstance(output, torch.Tensor) and output.is_floating_point()):
            return False
        first = arguments[0] if arguments else None
        return not self.makes_floats or (
            isinstance(first, torch.Tensor) and first.is_cuda and first.numel() > 0 and not is_held(first)
        )

    def writes(self, arguments, options):
        """The tensors among its arguments that it writes into."""
        return tensors_in(
            arguments[place] if place < len(arguments) else options.get(name) for place, name in self.written
        )

    def reads(self, arguments, options):
        """The tensors among its arguments whose values the result depends on."""
        read = tensors_in(value for n, value in enumerate(arguments) if n not in self.overwritten)
        return read + tensors_in(value for name, value in options.items() if name not in self.only_written)

    def reads_of_sides(self, arguments, values_of):
        """The tensors that `where` depends on: its condition, and each side that it takes anything from.

        `values_of(tensor)` gives a tensor's values, or None where nobody knows them.
        """
        condition, *sides = arguments
        values = values_of(condition)
        if values is None:
            return arguments
        taken = values.any(), not values.all()
        return [condition, *(side for side, is_taken in zip(sides, taken, strict=True) if is_taken)]

    def dim(self, arguments, options):
        """The dimension along which an operator of CHOOSE chooses."""
        place = 2 if self.base == "topk" else 1
        dim = arguments[place] if len(arguments) > place else options.get("dim", -1)
        return -1 if dim is None else dim


def tensors_in(values):
    """All tensors among `values` and in the lists and tuples among them, in order."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found
