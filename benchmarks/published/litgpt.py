"""LitGPT's table of fine-tuning memory, run again on shape-only tensors with LitGPT's own model code.

Source: Lightning-AI/litgpt, tutorials/resource-tables.md of October 2023: max_memory_allocated on an
A100-SXM4-40GB with torch 2.1.0 and bitsandbytes 0.41.1. The model classes are imported from a checkout of
the commit that published the table. (The commit which the table names is eleven days older; its Llama norm
does not yet compute in fp32, and takes 3 to 7 % less memory than was measured.) What the training scripts and
Lightning Fabric do around the model is stated here, each with its place. The peak is in the first iteration:
the scripts take the longest example of the data set first.
"""

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.published.device import OUT_OF_MEMORY, PLACE, counted
from harness.hardware.hardware import Hardware

COMMIT = "0cc02afa"
CHECKPOINTS = {
    "phi-1.5": "phi-1_5",
    "StableLM-base-alpha-3b": "stablelm-base-alpha-3b",
    "Llama-2-7B": "Llama-2-7b-hf",
    "Llama-2-13B": "Llama-2-13b-hf",
    "falcon-40b": "falcon-40b",
}
LORA = {"r": 8, "alpha": 16, "dropout": 0.05, "to_query": True, "to_value": True}
"""finetune/lora.py, "Hyperparameters"."""
HEAD_CHUNK = 128
"""Tokens of one product of the output head (finetune/*.py: lm_head_chunk_size)."""


def allocated_row(checkout: Path, case: dict[str, Any], hardware: Hardware) -> int | None:
    """max_memory_allocated in bytes of the first iteration of a case; None: out of memory."""
    quantization, length = case["quantization"], case["max_seq"]
    module, utils = _imported(checkout, case["method"])
    old_product = patch("bitsandbytes.autograd._functions.MatMul4Bit", MatMul4Bit)
    with counted(hardware, hardware.memory_bytes) as (memory, device), old_product:
        try:
            with device:
                model = _model(module, CHECKPOINTS[case["model"]], case["method"], quantization)
                model.max_seq_length = length  # train(): fp32 cosines and sines of that many positions
                memory.reset_peak()
                _first_iteration(model, utils.chunked_cross_entropy, case["batch"], length)
        except OUT_OF_MEMORY:
            return None
        return memory.peak_bytes


def _first_iteration(model: Any, loss_of: Any, micro_batch: int, length: int) -> None:
    """train() of finetune/*.py; outputs become fp32 (Fabric's HalfPrecision.convert_output)."""
    ids, targets = (
        torch.zeros(micro_batch, length, dtype=torch.int64, device="cpu").to(PLACE) for _ in range(2)
    )
    logits = [chunk.float() for chunk in model(ids, lm_head_chunk_size=HEAD_CHUNK)]
    logits[-1] = logits[-1][..., :-1, :]
    loss = loss_of(logits, targets[..., 1:])
    (loss / 128).backward()


def _model(module: ModuleType, checkpoint: str, method: str, quantization: str | None) -> Any:
    """The model in bf16, made on the device and loaded; with `quantization`, every Linear a quantized one."""
    config = module.Config.from_name(checkpoint, **(LORA if method == "lora" else {}))
    linear_class = _quantized_linear(double=quantization.endswith("-dq")) if quantization else torch.nn.Linear
    torch.set_default_dtype(torch.bfloat16)
    try:
        with PLACE, patch("torch.nn.Linear", linear_class):
            model = module.GPT(config)
    finally:
        torch.set_default_dtype(torch.float32)
    getattr(module, f"mark_only_{method}_as_trainable")(model)
    for layer in model.modules():
        if quantization and isinstance(layer, linear_class):
            layer.quantize(
                torch.empty(layer.out_features, layer.in_features, dtype=torch.float16, device=PLACE)
            )
    return model.train()


def _quantized_linear(double: bool) -> type[torch.nn.Linear]:
    """What lightning/fabric/plugins/precision/bitsandbytes.py puts in the place of torch.nn.Linear.

    It quantizes, from fp16, the weights that it was made with, and again those that are loaded.
    """
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn import Linear4bit

    class QuantizedLinear(Linear4bit):
        def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
            super().__init__(inputs, outputs, bias, torch.bfloat16, double, "nf4")
            self.quantize(self.weight.data.to(torch.float16))

        def quantize(self, weight: Tensor) -> None:
            with torch.device("cpu"):  # where bitsandbytes computes its code book
                data, state = quantize_4bit(weight, compress_statistics=double, quant_type="nf4")
            self.weight.data, self.weight.quant_state = data, state
            self.weight.bnb_quantized = True

    return QuantizedLinear


class MatMul4Bit(torch.autograd.Function):
    """bitsandbytes/autograd/_functions.py before 0.43.2: it keeps its input until its graph is freed.

    The weight is dequantized to the dtype that it was quantized from, then cast. (#1270 of July 2024, "delete
    useless buffered activation", ended the keeping.)
    """

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, out: None = None, bias: Tensor | None = None, state: Any = None
    ) -> Any:
        from bitsandbytes.functional import dequantize_4bit

        ctx.tensors, ctx.state = (a, b), state
        return linear(a, dequantize_4bit(b, state).to(a.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from bitsandbytes.functional import dequantize_4bit

        (gradient,) = gradients
        weight = dequantize_4bit(ctx.tensors[1], ctx.state)
        return torch.matmul(gradient, weight.to(gradient.dtype)), None, None, None, None


@cache
def _imported(checkout: Path, method: str) -> tuple[ModuleType, ModuleType]:
    """lit_gpt.<method> and lit_gpt.utils. Lightning, which they import and do not use here, is mocked."""
    imports = MagicMock(
        RequirementCache=lambda name: not name.startswith("flash-attn")
    )  # the table says: SDPA
    names = ("fabric", "fabric.strategies", "fabric.utilities", "fabric.utilities.load")
    mocked = {"lightning": MagicMock(), **{f"lightning.{name}": MagicMock() for name in names}}
    mocked |= {"lightning_utilities": MagicMock(), "lightning_utilities.core": MagicMock()}
    mocked["lightning_utilities.core.imports"] = imports
    sys.path.insert(0, str(checkout))
    sys.modules.update(mocked)
    try:
        return import_module(f"lit_gpt.{method}"), import_module("lit_gpt.utils")
    finally:
        for name in mocked:
            del sys.modules[name]
