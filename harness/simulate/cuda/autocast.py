"""torch.autocast as CUDA does it, for shape-only tensors.

Autocast is a dispatch key of the device, and the meta device has none. Here the same casts are made one level
up, where Python calls the function. The lists of functions (ATen/autocast_mode.h) and the cache of casts of
weights are the same, and autograd records the same copies.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from harness.system import Replacement, TorchRelease, all_replaced


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOWER_PRECISION = _names(
    """
    _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
    convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
    chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell
    rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
    """
)
"""AT_FORALL_LOWER_PRECISION_FP: floating arguments become the autocast dtype."""
FP32 = _names(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus
    layer_norm native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity
    poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
    upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa norm
    """
)
"""AT_FORALL_FP32: floating arguments become fp32. And norm, whose result is fp32 in any case."""
if not TorchRelease.of(torch.__version__).autocasts_rms_norm:
    FP32 -= {"rms_norm"}
FP32_RESULT = _names("prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum")
"""AT_FORALL_FP32_SET_OPT_DTYPE: computed in fp32 unless the call names a dtype."""
PROMOTE = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
"""AT_FORALL_PROMOTE: arguments of several floating dtypes become the widest one."""
ALIASES = {"__matmul__": "matmul", "__rmatmul__": "matmul", "__pow__": "pow", "__rpow__": "pow"}


@dataclass
class _State:
    """The autocast state of the meta device, which torch keeps in thread-local storage for other devices."""

    enabled: bool = False
    dtype: torch.dtype = torch.bfloat16
    nesting: int = 0
    """How many regions of autocast are entered now."""
    cache: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict[int, tuple[Tensor, Tensor]])
    """By id of a weight: the weight and its cast."""


class _ShapeAutocast:
    """torch.autocast("meta", ...). Like torch's own, an instance may be entered more than once."""

    def __init__(self, state: _State, dtype: torch.dtype | None, enabled: bool) -> None:
        self._state = state
        self._dtype = dtype or state.dtype
        self._enabled = enabled

    def __enter__(self) -> None:
        state = self._state
        self._before = state.enabled, state.dtype
        state.enabled, state.dtype = self._enabled, self._dtype
        state.nesting += 1
        # pushed here and not once for the run: backward (a checkpointed block) starts with no modes
        self._casts = _Casts(state)
        self._casts.__enter__()

    def __exit__(self, *_: object) -> None:
        self._casts.__exit__(None, None, None)
        state = self._state
        state.enabled, state.dtype = self._before
        state.nesting -= 1
        if state.nesting == 0:
            state.cache.clear()


class _Casts(TorchFunctionMode):
    """A mode that casts the arguments of every listed function while autocast is enabled."""

    def __init__(self, state: _State) -> None:
        super().__init__()
        self._state = state

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # autocast has kernels for no overload that writes into a given tensor or names the result's dtype
        if self._state.enabled and kwargs.keys().isdisjoint(("out", "out_dtype")):
            name = getattr(func, "__name__", "")
            if func is functional.cross_entropy and _floats(args) and args[0].dtype != torch.float32:
                func = _cross_entropy
            args, kwargs = self._cast(ALIASES.get(name, name), args, kwargs)
        held = list(args)
        del args
        out = func(*held, **kwargs)
        for i in range(len(held)):  # C++ destroys the casts in the reverse order of their making
            held[i] = None
        return out

    def _cast(self, name: str, args: Any, kwargs: Any) -> Any:
        """The arguments that the function called `name` gets under autocast."""
        if name in LOWER_PRECISION:
            return self._mapped(lambda t: self._cached_cast(t, self._state.dtype), args, kwargs)
        if name in FP32:
            return self._mapped(lambda t: self._cached_cast(t, torch.float32), args, kwargs)
        if name in FP32_RESULT and kwargs.get("dtype") is None and _floats(args):
            return args, {**kwargs, "dtype": torch.float32}
        if name in PROMOTE:
            widest = torch.float32 if torch.float32 in {t.dtype for t in _floats(args)} else self._state.dtype
            return self._mapped(lambda t: self._cached_cast(t, widest), args, kwargs)
        return args, kwargs

    @staticmethod
    def _mapped(cast: Callable[[Any], Any], args: Any, kwargs: Any) -> Any:
        """Cast all arguments, the last first, which is the order of gcc, with which torch is built."""

        def of(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(of(item) for item in value)
            return cast(value)

        kwargs = {name: of(value) for name, value in kwargs.items()}
        return tuple([of(arg) for arg in reversed(args)])[::-1], kwargs

    def _cached_cast(self, value: Any, dtype: torch.dtype) -> Any:
        """`value` in `dtype`. The cast of an fp32 leaf that requires a gradient is cached (as by
        at::autocast::cached_cast)."""
        if not isinstance(value, Tensor) or not _eligible(value) or value.dtype == dtype:
            return value
        keep = (
            dtype == self._state.dtype
            and value.dtype == torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
        )
        if not keep:
            return value.to(dtype)
        known = self._state.cache.get(id(value))
        if known is None:
            known = self._state.cache[id(value)] = (value, value.to(dtype))
        return known[1]


def _cross_entropy(input: Tensor, target: Tensor, *_: Any, **settings: Any) -> Tensor:
    """Cross-entropy under autocast (ATen/native/LossNLL.cpp, cross_entropy_loss): log_softmax is called with
    the dtype of the input, and nll_loss is one of FP32. Labels are never smoothed here."""
    settings.pop("label_smoothing", None)
    log_probs = functional.log_softmax(input, 1, dtype=input.dtype)
    return functional.nll_loss(log_probs.float(), target, **settings)


def _eligible(tensor: Tensor) -> bool:
    """Whether autocast casts such a tensor."""
    return tensor.device.type == "meta" and tensor.is_floating_point() and tensor.dtype != torch.float64


def _floats(args: Any) -> list[Tensor]:
    return [a for a in args if isinstance(a, Tensor) and _eligible(a)]


@contextmanager
def cuda_autocast_on_meta() -> Iterator[None]:
    """Inside, torch.autocast("meta"), and torch's functions that ask about autocast, behave as for CUDA."""
    state = _State()
    real_autocast, real_enabled = torch.autocast, torch.is_autocast_enabled
    real_dtype, real_available = torch.get_autocast_dtype, torch.amp.is_autocast_available
    real_clear = torch.clear_autocast_cache

    def autocast(device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> Any:
        if device_type == "meta":
            return _ShapeAutocast(state, dtype, enabled)
        return real_autocast(device_type, dtype, enabled, cache_enabled)

    def is_autocast_enabled(device_type: str = "meta") -> bool:  # no argument asks about CUDA
        return state.enabled if device_type in ("meta", "cuda") else real_enabled(device_type)

    def get_autocast_dtype(device_type: str) -> torch.dtype:
        return state.dtype if device_type in ("meta", "cuda") else real_dtype(device_type)

    def is_autocast_available(device_type: str) -> bool:
        return device_type == "meta" or real_available(device_type)

    def clear_autocast_cache() -> None:
        real_clear()
        state.cache.clear()

    why = "does not know autocast for shape-only tensors"
    # transformers turns autocast off where positions are multiplied, on every device but meta
    # (utils/generic.py, maybe_autocast): there it returns nullcontext(), so that has to do it.
    generic = "transformers.utils.generic.nullcontext"
    with all_replaced(
        [
            Replacement("torch.autocast", autocast, why),
            Replacement("torch.amp.autocast", autocast, why),
            Replacement("torch.get_autocast_gpu_dtype", lambda: state.dtype, why),
            Replacement("torch.is_autocast_enabled", is_autocast_enabled, why),
            Replacement("torch.get_autocast_dtype", get_autocast_dtype, why),
            Replacement("torch.amp.is_autocast_available", is_autocast_available, why),
            Replacement("torch.clear_autocast_cache", clear_autocast_cache, why),
            Replacement(generic, lambda: _ShapeAutocast(state, state.dtype, False), "leaves autocast on"),
        ]
    ):
        yield
