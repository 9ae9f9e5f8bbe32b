"""Liger-Kernel's benchmark of its kernels and of Hugging Face's modules, run again on shape-only tensors.

Source: linkedin/Liger-Kernel, benchmark/scripts (September to November 2024): set-ups, the function that
is measured and how (`_test_memory`: ten times reset_peak_memory_stats, the function, max_memory_allocated;
the median). Gradients are never cleared between the ten. Liger's kernels have changed since: a row of theirs
wants the version of its day, which runs in a process of its own:

    PYTHONPATH=FOLDER_OF_THAT_LIGER python -m benchmarks.published.kernels VERSION
"""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from benchmarks.published.cases import published_cases
from benchmarks.published.device import PLACE, counted
from harness.hardware.hardware import Hardware, find_hardware

BF16 = torch.bfloat16
ROUNDS = 3
"""The second round equals the third: gradients are there since the first."""


def cross_entropy(config: dict[str, Any], vocab: int, liger: bool) -> Callable[[], None]:
    """benchmark_cross_entropy.py: B * T rows of fp32 logits."""
    rows = config["B"] * config["T"]
    logits = torch.randn(rows, vocab, requires_grad=True, device=PLACE)
    target = torch.randint(vocab, (rows, 1), device=PLACE).squeeze(1)
    if liger:
        loss = _liger("cross_entropy", "LigerCrossEntropyFunction")
        return lambda: _first(loss(logits, target, -100)).backward()
    return lambda: nn.CrossEntropyLoss()(logits, target).backward()


def fused_linear_cross_entropy(config: dict[str, Any], rows: int, liger: bool) -> Callable[[], None]:
    """benchmark_fused_linear_cross_entropy.py: a bf16 head and cross-entropy on its output."""
    hidden, vocab = config["H"], config["V"]
    head, unused = (nn.Linear(hidden, vocab, bias=False, dtype=BF16, device=PLACE) for _ in range(2))
    states = torch.randn(rows, hidden, requires_grad=True, dtype=BF16, device=PLACE)
    target = torch.randint(vocab, (rows, 1), dtype=torch.long, device=PLACE).squeeze(1)
    if liger:
        fused = _liger("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")
        return _keeping(unused, lambda: _first(fused(states, head.weight, target)).backward())
    loss = nn.CrossEntropyLoss(ignore_index=-100, reduction="mean")
    return _keeping(unused, lambda: loss(head(states), target).backward())


def rms_norm(config: dict[str, Any], hidden: int, liger: bool) -> Callable[[], None]:
    """benchmark_rms_norm.py: fp32 weight on a bf16 input."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x = torch.randn(config["M"], hidden, dtype=BF16, device=PLACE)
    dy = torch.randn_like(x)
    x.requires_grad_(True)
    layer, unused = LlamaRMSNorm(hidden).to(PLACE), torch.ones(hidden, device=PLACE)
    if liger:
        normed = _liger("rms_norm", "LigerRMSNormFunction")
        return _keeping(
            unused, lambda: normed(x, layer.weight, 1e-6, 0.0, "llama").backward(dy, retain_graph=True)
        )
    return _keeping(unused, lambda: layer(x).backward(dy, retain_graph=True))


def gated_mlp(config: dict[str, Any], length: int, liger: bool) -> Callable[[], None]:
    """benchmark_swiglu.py and benchmark_geglu.py: a bf16 LlamaMLP."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    names = ("hidden_size", "intermediate_size", "hidden_act")
    sizes = LlamaConfig(**{name: config[name] for name in names})
    batch = config.get("B") or config["bsz"]
    x = torch.randn(batch, length, config["hidden_size"], dtype=BF16, device=PLACE, requires_grad=True)
    layer: Any = LlamaMLP(sizes).to(PLACE).to(BF16)
    if liger and config["hidden_act"] == "silu":
        multiplied = _liger("swiglu", "LigerSiLUMulFunction")
    elif liger:
        multiplied = _liger("geglu", "LigerGELUMulFunction")

    def full() -> None:
        y = layer.down_proj(multiplied(layer.gate_proj(x), layer.up_proj(x))) if liger else layer(x)
        y.backward(torch.randn_like(y), retain_graph=True)

    return full


def rope(config: dict[str, Any], size: int, liger: bool) -> Callable[[], None]:
    """benchmark_rope.py: gradients of rotated bf16 queries and keys; `size` is the width, or the length."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    hidden, length = (size, config["seq_len"]) if "seq_len" in config else (config["hidden_size"], size)
    heads, kv_heads = config["num_q_heads"], config["num_kv_heads"]
    head_dim = hidden // heads
    leaves = [
        torch.randn(1, length, n, head_dim, requires_grad=True, dtype=BF16, device=PLACE)
        for n in (heads, kv_heads)
    ]
    q, k = (leaf.transpose(1, 2) for leaf in leaves)
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    positions = torch.arange(length, device=PLACE).unsqueeze(0)
    # transformers of that day multiplied matrices here (today's does not): that is when cuBLAS starts
    inv_freq = torch.ones(head_dim // 2, device=PLACE)
    freqs = (inv_freq[None, :, None].expand(1, -1, 1) @ positions[:, None, :].float()).transpose(1, 2)
    angles = torch.cat((freqs, freqs), dim=-1)
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    del freqs, angles
    rotate = _liger("rope", "LigerRopeFunction") if liger else apply_rotary_pos_emb

    def full() -> None:
        outputs = rotate(q, k, cos, sin)
        torch.autograd.grad(outputs, (q, k), (dq, dk), allow_unused=True, retain_graph=True)

    return _keeping((inv_freq, positions), full)


KERNELS = {
    "cross_entropy": cross_entropy,
    "fused_linear_cross_entropy": fused_linear_cross_entropy,
    "geglu": gated_mlp,
    "rms_norm": rms_norm,
    "rope": rope,
    "swiglu": gated_mlp,
}


def allocated_row(case: dict[str, Any], hardware: Hardware) -> int:
    """Peak bytes of a case of the published measurements."""
    _, kernel, provider, *_ = case["id"].split("/")
    size = int(case["x"]["value"])
    return peak_bytes(lambda: KERNELS[kernel](case["config"], size, provider == "liger"), hardware)


def _liger(module: str, name: str) -> Any:
    """One of Liger's autograd functions; its layers import what transformers no longer has."""
    return getattr(import_module(f"liger_kernel.ops.{module}"), name).apply


def _first(result: Any) -> Any:
    """The loss: later versions return more."""
    return result[0] if isinstance(result, tuple) else result


def _keeping(unused: object, function: Callable[[], None]) -> Callable[[], None]:
    """`function`, and what its set-up made and left lying on the device."""
    function.unused = unused  # type: ignore[attr-defined]
    return function


def peak_bytes(setup: Callable[[], Callable[[], None]], hardware: Hardware) -> int:
    """max_memory_allocated of one steady round, in bytes."""
    with counted(hardware, hardware.memory_bytes) as (memory, device), device:
        function = setup()
        for _ in range(ROUNDS):
            memory.reset_peak()
            function()
        return memory.peak_bytes


def main() -> None:
    """Print, as JSON, the peak bytes of Liger's own rows that were measured with the version given."""
    wanted = sys.argv[1]
    if version("liger-kernel") != wanted:
        sys.exit(f"liger-kernel {wanted} is wanted, {version('liger-kernel')} is what Python finds")
    hardware = find_hardware("a100-80gb")
    cases = [case for case in published_cases("liger-kernel") if case["versions"]["liger"] == wanted]
    print(
        json.dumps({c["id"]: allocated_row(c, hardware) for c in cases if c["id"].split("/")[2] == "liger"})
    )


if __name__ == "__main__":
    main()
