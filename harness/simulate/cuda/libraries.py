"""Functions of transformers, peft, Liger, Triton, TRL, torchao and bitsandbytes that depend on the device,
replaced so that they behave as on a GPU."""

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from importlib.util import find_spec
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from harness.formula import Ruled, liger_logits
from harness.kernels import Gpu
from harness.recipe import Recipe
from harness.simulate.cuda.device_is_cuda import as_on_cuda
from harness.system import Replacement, nothing, replaced
from harness.training import on_host


def import_bitsandbytes_fast() -> None:
    """Import bitsandbytes without importing torch's compiler, which decorates its CPU kernels.

    That import takes seconds, and no kernel runs on shapes.
    """

    def as_it_is(function: Any = None, **_: Any) -> Any:
        return (lambda f: f) if function is None else function

    if find_spec("bitsandbytes") is not None:
        with replaced(torch, "compile", as_it_is):
            import bitsandbytes  # noqa: F401


def library_replacements(
    recipe: Recipe, gpu: Gpu, ruled: dict[int, Ruled], synchronize: Callable[[], None]
) -> Iterator[Replacement]:
    """The functions of the recipe's libraries that behave differently without `gpu`. They note in `ruled` the
    bytes of what they make by a rule, and `synchronize` with the device."""
    capability = gpu.capability
    experts = sys.modules.get("transformers.integrations.moe")
    # older releases loop in Python over the tokens of each expert, which shapes do not have
    if experts is not None and hasattr(experts, "_grouped_mm_fallback_bwd"):
        answer = as_on_cuda(experts._can_use_grouped_mm, capability)
        name = "transformers.integrations.moe._can_use_grouped_mm"
        yield Replacement(name, answer, "loops over experts where a GPU is too old")
    if find_spec("triton") is not None:
        why = "runs kernels (Liger's), which write into tensors that Python made"
        run = _timed if recipe.by_liger or recipe.by_odds else nothing
        yield Replacement("triton.runtime.jit.JITFunction.run", run, why)
        yield Replacement("triton.runtime.interpreter.InterpretedFunction.run", run, why)
        why = "measures which way of computing is the fastest (of Liger's kernels for experts)"
        yield Replacement("triton.runtime.autotuner.Autotuner.run", _chosen_once(), why)
    if recipe.by_liger and find_spec("liger_kernel") is not None:
        why = "has a row of a weight's gradient for each multiprocessor"
        properties = SimpleNamespace(multi_processor_count=gpu.sm_count)
        yield Replacement("torch.cuda.get_device_properties", lambda *_: properties, why)
        place = "liger_kernel.ops.rms_norm"
        backward = as_on_cuda(resolve_name(f"{place}.rms_norm_backward"), capability)
        yield Replacement(f"{place}.device_context", lambda device: nullcontext(), why)
        yield Replacement(f"{place}.rms_norm_backward", backward, why)
    if recipe.fused_loss and find_spec("liger_kernel") is not None:
        from liger_kernel.ops import fused_linear_cross_entropy as liger

        name = "fused_linear_cross_entropy_forward"
        forward = _ruled_chunks(as_on_cuda(getattr(liger, name), capability), ruled)
        why = "makes new memory where a GPU multiplies into memory that it has"
        yield Replacement(f"{liger.__name__}.{name}", forward, why)
    if recipe.by_trl and find_spec("trl") is not None:
        why = "folds and multiplies tiles by operators of PyTorch where a GPU has kernels"
        for name in ("forward", "backward"):
            path = f"trl.kernels.chunked_logprob.ChunkedLogProbFunction.{name}"
            yield Replacement(path, staticmethod(as_on_cuda(resolve_name(path), capability)), why)
        yield Replacement("trl.trainer.utils._use_triton", lambda device: True, why)
    if recipe.by_odds and find_spec("trl") is not None:
        answer = as_on_cuda(resolve_name("trl.trainer.utils._supports_trl_loss_kernel"), capability)
        why = "takes a row at a time where a GPU has a kernel"
        yield Replacement("trl.trainer.utils._supports_trl_loss_kernel", answer, why)
    if recipe.chunked_loss:
        why = "is one operator, whose shapes show nothing of its chunks"
        yield Replacement(f"{CHUNKED}._linear_cross_entropy_batch_chunked", _chunked_loss(capability), why)
        options = "torch.nn.LinearCrossEntropyOptions._resolve_auto_acc_dtype"
        wide = staticmethod(lambda dtype, device: torch.float32 if dtype in (torch.bfloat16,) else None)
        yield Replacement(options, wide, "asks whether the GPU adds bf16 up in fp32")
    if recipe.upcast_for_kbit:
        from peft import prepare_model_for_kbit_training as prepare

        name = "peft.prepare_model_for_kbit_training"
        yield Replacement(name, _with_cuda(prepare), "empties the cache only if there is CUDA")
    if recipe.by_peft:
        name = "peft.tuners.tuners_utils.BaseTuner.inject_adapter"
        inject = as_on_cuda(resolve_name(name), capability)
        yield Replacement(name, inject, "leaves what is on the meta device as it is")
        data = property(_DATA.__get__, _set_data)
        yield Replacement("torch.Tensor.data", data, "takes no weight of the host to the meta device")
    if recipe.four_bit and find_spec("bitsandbytes") is not None:
        why = "copies into a tensor on the CPU, which takes no shapes (peft copies a layer for DoRA)"
        yield Replacement("bitsandbytes.nn.Params4bit.__deepcopy__", _copied, why)
    if recipe.low_rank_optimizer and find_spec("apollo_torch") is not None:
        why = "asks a device without generators for one"
        yield Replacement("apollo_torch.random_projector.stable_randn", _drawn, why)
    if recipe.by_torchao and find_spec("torchao") is not None:
        yield Replacement("torch.compile", _compiled_step, "compiles torchao's step, kernels and all")
    if recipe.by_bitsandbytes and find_spec("bitsandbytes") is not None:
        why = "asks CUDA for managed memory"
        yield Replacement("bitsandbytes.functional.get_paged", _paged, why)
        yield Replacement("bitsandbytes.functional.fill", nothing, why)
        yield Replacement("bitsandbytes.functional.prefetch_tensor", nothing, why)
        why = "waits for a GPU alone, after each weight's step"
        yield Replacement("bitsandbytes.optim.optimizer.sync_gpu", lambda _: synchronize(), why)


def _ruled_chunks(forward: Callable[..., Any], ruled: dict[int, Ruled]) -> Callable[..., Any]:
    """Liger's `forward`, while which the bytes of a chunk's logits are known to be by a rule."""

    def chunked(_input: Tensor, weight: Tensor, *given: Any, **options: Any) -> Any:
        size_bytes = liger_logits(len(_input), *weight.shape, _input.element_size())
        ruled[size_bytes] = size_bytes
        results = forward(_input, weight, *given, **options)
        ruled.clear()
        return results

    return chunked


CHUNKED = "torch.nn.modules.linear_cross_entropy"


def _chunked_loss(capability: tuple[int, int]) -> Callable[..., Any]:
    """PyTorch's chunked cross-entropy, not as one operator but as a function whose operators are seen. Its
    derivative is the operator's own."""
    library = resolve_name(CHUNKED)
    chunks = as_on_cuda(library._linear_cross_entropy_batch_chunked_accumulator, capability)

    class Chunked(torch.autograd.Function):
        setup_context = staticmethod(library._linear_cross_entropy_batch_chunked_setup_context)
        backward = staticmethod(library._linear_cross_entropy_batch_chunked_backward)

        @staticmethod
        def forward(*given: Any) -> Any:
            *inputs, _, for_states, for_weight, for_bias = given
            return chunks(*inputs, for_states, for_weight, for_bias)

    return Chunked.apply


def _drawn(shape: Any, seed: int, device: Any = None, dtype: Any = torch.float32) -> Tensor:
    """apollo_torch's stable_randn without a generator."""
    return torch.randn(shape, device=device, dtype=dtype)


def _compiled_step(function: Any = None, **_: Any) -> Any:
    """torch.compile for torchao's step of one weight (torchao/optim/adam.py, single_param_adam).

    It allocates what the allocator of PyTorch's CUDA build sees on a virtual GPU: new scales, both moments in
    fp32, and with 4 bits their codes as 64-bit integers before they are packed.
    """

    def step(weight: Tensor, grad: Tensor, count: Tensor, *moments: Any, **_: Any) -> None:
        stored = [getattr(moment, "codes", moment) for moment in moments[:2]]
        made = list[Tensor]()
        if any(one is not codes for one, codes in zip(moments, stored, strict=False)):
            made = _temporaries(weight, *moments[:2])
        torch.ops.harness.triton_kernel([weight, weight, grad, *stored, *stored, *made, *made], "step")
        while made:
            del made[0]

    return step


def _temporaries(weight: Tensor, *moments: Any) -> list[Tensor]:
    """The temporaries of torchao's step, in the order in which they are freed. There are none where the
    blocks of 8 bits are rows of the weight, since one kernel then does everything."""
    packs = moments[0].codes.numel() < weight.numel()
    if not packs and (weight.dim() == 1 or weight.shape[-1] == moments[0].block_size):
        return []
    scales = [torch.empty_like(moment.scale) for moment in moments]
    wide = [torch.empty_like(weight, dtype=torch.float32) for _ in moments]
    if not packs:
        return [*wide, *scales]
    indices = [torch.empty_like(weight, dtype=torch.int64) for _ in moments]
    return [each for of_one in zip(wide, indices, scales, strict=True) for each in of_one]


def _timed(kernel: Any, *args: Any, **kwargs: Any) -> None:
    """A Triton kernel as an operator (kernels/triton_kernels.py)."""
    touched = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    torch.ops.harness.triton_kernel(touched, kernel.fn.__name__)


def _chosen_once() -> Callable[..., None]:
    """The run of a Triton kernel that is measured at first. Each measurement overwrites what the L2 cache has
    with a tensor of 256 MiB (triton/backends/nvidia/driver.py, get_empty_cache_for_benchmark)."""
    measured = set[int]()

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        if id(kernel) not in measured:
            measured.add(id(kernel))
            torch.empty(2**26, dtype=torch.int32, device="meta")
        kernel.fn.run(*args, **kwargs)

    return run


def _with_cuda(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """`prepare` with CUDA available, where peft empties the cache after it has upcast the weights."""

    def prepared(*args: Any, **kwargs: Any) -> Any:
        with replaced(resolve_name("torch.cuda"), "is_available", lambda: True):
            return prepare(*args, **kwargs)

    return prepared


_DATA: Any = Tensor.data


def _set_data(tensor: Tensor, data: Tensor) -> None:
    """The setter of Tensor.data, by which a weight of the host comes to a GPU (peft's PiSSA)."""
    if data.is_meta and not tensor.is_meta:
        torch.utils.swap_tensors(tensor, torch.nn.Parameter(data, tensor.requires_grad))
    else:
        _DATA.__set__(tensor, data)


def _copied(weight: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of a 4-bit weight. Its quantization state is copied first, and then its values."""
    state = deepcopy(weight.quant_state, memo)
    return type(weight)(
        deepcopy(weight.data, memo), **{**weight.__dict__, "quant_state": state, "requires_grad": False}
    )


def _paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
    """bitsandbytes' paged state: CUDA managed memory, which the host backs, not the caching allocator."""
    with on_host():
        state = torch.zeros(shape, dtype=dtype, device=device)
    state.is_paged = True  # type: ignore[attr-defined]
    return state
