"""Liger-Kernel's benchmark of the Hugging Face modules, run again on shape-only tensors.

Source: linkedin/Liger-Kernel, benchmark/scripts (September to November 2024): set-ups, the function that is
measured and how (`_test_memory`: ten times reset_peak_memory_stats, the function, max_memory_allocated; the
median). Gradients are never cleared between the ten. Liger's own kernels are Triton and do not run on shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from harness.allocator_settings import Settings
from harness.cuda_rules import CudaRules, cuda_behaviour
from harness.hardware import Hardware
from harness.module_paths import ModulePaths
from harness.recipe import Recipe
from harness.simulated_device import SimulatedDevice
from harness.simulated_memory import SimulatedMemory
from harness.simulated_time import SimulatedTime

META = torch.device("meta")
BF16 = torch.bfloat16
ROUNDS = 3
"""The second round equals the third: gradients are there since the first."""


def cross_entropy(config: dict[str, Any], vocab: int) -> Callable[[], None]:
    """benchmark_cross_entropy.py: B * T rows of fp32 logits."""
    rows = config["B"] * config["T"]
    logits = torch.randn(rows, vocab, requires_grad=True, device=META)
    target = torch.randint(vocab, (rows, 1), device=META).squeeze(1)
    loss = nn.CrossEntropyLoss()
    return lambda: loss(logits, target).backward()


def fused_linear_cross_entropy(config: dict[str, Any], rows: int) -> Callable[[], None]:
    """benchmark_fused_linear_cross_entropy.py, TorchLMHeadCE: bf16 head, then cross-entropy on its output."""
    hidden, vocab = config["H"], config["V"]
    head, _liger_head = (nn.Linear(hidden, vocab, bias=False, dtype=BF16, device=META) for _ in range(2))
    states = torch.randn(rows, hidden, requires_grad=True, dtype=BF16, device=META)
    target = torch.randint(vocab, (rows, 1), dtype=torch.long, device=META).squeeze(1)
    loss = nn.CrossEntropyLoss(ignore_index=-100, reduction="mean")

    def full() -> None:
        loss(head(states), target).backward()

    full.unused = _liger_head  # type: ignore[attr-defined]
    return full


def rms_norm(config: dict[str, Any], hidden: int) -> Callable[[], None]:
    """benchmark_rms_norm.py: fp32 weight on a bf16 input."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x = torch.randn(config["M"], hidden, dtype=BF16, device=META)
    dy = torch.randn_like(x)
    x.requires_grad_(True)
    layer, other = LlamaRMSNorm(hidden).to(META), torch.ones(hidden, device=META)

    def full() -> None:
        y = layer(x)
        y.backward(dy, retain_graph=True)

    full.unused = other  # type: ignore[attr-defined]
    return full


def gated_mlp(config: dict[str, Any], length: int) -> Callable[[], None]:
    """benchmark_swiglu.py and benchmark_geglu.py: a bf16 LlamaMLP."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    sizes = {name: config[name] for name in ("hidden_size", "intermediate_size", "hidden_act")}
    batch = config.get("B") or config["bsz"]
    x = torch.randn(batch, length, config["hidden_size"], dtype=BF16, device=META, requires_grad=True)
    layer = LlamaMLP(LlamaConfig(**sizes)).to(META).to(BF16)

    def full() -> None:
        y = layer(x)
        y.backward(torch.randn_like(y), retain_graph=True)

    return full


def rope(config: dict[str, Any], size: int, sizes_name: str) -> Callable[[], None]:
    """benchmark_rope.py: gradients of rotated bf16 queries and keys; `sizes_name` is what `size` is."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    hidden, length = (size, config["seq_len"]) if sizes_name == "H" else (config["hidden_size"], size)
    heads, kv_heads = config["num_q_heads"], config["num_kv_heads"]
    head_dim = hidden // heads
    leaves = [
        torch.randn(1, length, n, head_dim, requires_grad=True, dtype=BF16, device=META)
        for n in (heads, kv_heads)
    ]
    q, k = (leaf.transpose(1, 2) for leaf in leaves)
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    positions = torch.arange(length, device=META).unsqueeze(0)
    # transformers of that day multiplied matrices here (today's does not): that is when cuBLAS starts
    inv_freq = torch.ones(head_dim // 2, device=META)
    freqs = (inv_freq[None, :, None].expand(1, -1, 1) @ positions[:, None, :].float()).transpose(1, 2)
    angles = torch.cat((freqs, freqs), dim=-1)
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    del freqs, angles

    def full() -> None:
        outputs = apply_rotary_pos_emb(q, k, cos, sin)
        torch.autograd.grad(outputs, (q, k), (dq, dk), allow_unused=True, retain_graph=True)

    full.unused = inv_freq, positions  # type: ignore[attr-defined]
    return full


def peak_bytes(setup: Callable[[], Callable[[], None]], hardware: Hardware) -> int:
    """max_memory_allocated of one steady round, in bytes."""
    memory = SimulatedMemory(Settings(), hardware.memory_bytes)
    rules = CudaRules(Recipe(model="none"), hardware)
    with cuda_behaviour(rules), SimulatedDevice(memory, rules, SimulatedTime(hardware), ModulePaths()):
        function = setup()
        for _ in range(ROUNDS):
            memory.reset_peak()
            function()
        return memory.peak_bytes
