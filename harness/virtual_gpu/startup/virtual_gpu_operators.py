"""Which operators have values on the virtual GPU, by name, and how they differ from one another."""


def _words(text):
    return text.split()


OPERATORS = _words("""
    copy_ _local_scalar_dense fill_ zero_ arange range linspace eye tril_indices triu_indices randperm random_
    add add_ sub sub_ rsub mul mul_ div div_ floor_divide floor_divide_ remainder remainder_ fmod fmod_ neg
    neg_ abs abs_ sign sign_ clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ maximum minimum reciprocal
    pow pow_ round floor ceil trunc bitwise_and bitwise_and_ bitwise_or bitwise_or_ bitwise_xor bitwise_xor_
    bitwise_not bitwise_not_ bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ __ilshift__
    __irshift__ eq eq_ ne ne_ lt lt_ le le_ gt gt_ ge ge_ logical_and logical_or logical_xor logical_not isnan
    isposinf isneginf isin where masked_fill_ masked_scatter_ masked_select sum prod any all max min amax amin
    aminmax argmax argmin count_nonzero cumsum cumsum_ cumprod _cummax_helper _cummin_helper sort topk
    kthvalue mode median bincount histc searchsorted bucketize nonzero _unique _unique2 unique_dim
    unique_consecutive unique_dim_consecutive repeat_interleave cat index index_select gather scatter scatter_
    scatter_add scatter_add_ scatter_reduce scatter_reduce_ _index_put_impl_ index_add index_add_ index_copy
    index_copy_ index_fill_ take put_ flip roll tril tril_ triu triu_ acos_ acosh_ addcdiv_ addcmul_ asin_
    asinh_ atan2_ atan_ atanh_ bitwise_left_shift_ bitwise_right_shift_ ceil_ copysign_ cos_ cosh_ cumprod_
    digamma_ elu_ erf_ erfc_ erfinv_ exp2_ exp_ expm1_ floor_ frac_ gcd_ gelu_ hardsigmoid_ hardswish_
    hardtanh_ heaviside_ hypot_ index_reduce_ lcm_ leaky_relu_ lerp_ lgamma_ log10_ log1p_ log2_ log_ logit_
    mish_ nextafter_ reciprocal_ relu_ round_ rsqrt_ sgn_ sigmoid_ silu_ sin_ sinc_ sinh_ sqrt_ tan_ tanh_
    threshold_ trunc_ xlogy_
""")
FORGET = _words("""
    addbmm_ addmm_ addmv_ baddbmm_ bernoulli_ cauchy_ embedding_renorm_ exponential_ geometric_ log_normal_
    normal_ renorm_ rrelu_with_noise_ uniform_
""")
"""What they write is not computed here, and what was there before is no longer true."""
MAKE_INTEGERS = _words("""
    eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isposinf isneginf isin any all
    argmax argmin count_nonzero sort topk kthvalue max min mode median _cummax_helper _cummin_helper
    searchsorted bucketize nonzero _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive
""")
"""Of floats too."""
COUNTED = ("nonzero", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive")
"""Their kernels copy to the host how many there are, and allocate accordingly."""
ALWAYS_IN_FORCE = (*COUNTED, "_local_scalar_dense", "repeat_interleave", "bincount")
CHOOSE = ("topk", "argmax")
"""Of scores that no kernel computed, as a router's, any choice is as good: by default, a balanced one."""
WITH_CHANCE = ("random_", "randperm")
OVERWRITE = ("fill_", "zero_")
"""What they write into has no say in the result."""
LEFT_OUT = ("aten::pow.Tensor_Tensor", "aten::pow.Tensor_Tensor_out", "aten::pow_.Tensor")
"""Torch wraps their numbers as tensors of the device, which it cannot give to Python."""
