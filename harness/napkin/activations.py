"""What autograd keeps of a micro batch from forward to backward, term by term, and the loss. No torch.

Which operator keeps what is PyTorch's tools/autograd/derivatives.yaml; how a layer is written out of operators,
transformers' models/*/modeling_*.py; what LoRA adds, peft/tuners/lora/layer.py. Korthikanti et al. (arXiv
2205.05198, section 4.1) count the same way for GPT with fused kernels: 34·S·B·H bytes a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

from harness.architecture import Block
from harness.errors import InputError
from harness.hardware import Hardware
from harness.napkin.layers import Matrix, matrices_of
from harness.napkin.terms import Dims, Term, letters, sum_of
from harness.napkin.weights import SIZES, BuiltModel

Kernel = Literal["eager", "fused", "plain"]
LOSS = "transformers/loss/loss_utils.py, ForCausalLMLoss"
LIGER = "arXiv 2410.10989; liger_kernel/ops/fused_linear_cross_entropy.py"
_KEPT_BY_ACTIVATION = {"gelu_new": 4, "gelu_fast": 4, "relu2": 2, "relu": 0, "xielu": 4}
"""Tensors of the MLP's width that a nonlinearity keeps, beside its result: SiLU and GELU their input; those
that are written out in Python, more."""


class Activations:
    """What one micro batch keeps. Sizes are those of a rank."""

    def __init__(self, built: BuiltModel, hardware: Hardware) -> None:
        self.built, self.recipe, self.shape = built, built.recipe, built.whole
        recipe = built.recipe
        self.numbers = letters(recipe, built.whole)
        self.dims = Dims(self.numbers)
        self.residual = SIZES[built.loose_dtype]
        """Bytes of an element of the residual stream."""
        if recipe.fsdp and recipe.mixed:
            self.residual = SIZES[recipe.compute_dtype]  # weights are gathered in 16 bit
        self.compute = SIZES[recipe.compute_dtype]
        """Of what a matrix product reads and writes."""
        upcast = recipe.upcast_for_kbit  # quantized layers return what they were given
        self.made = self.residual if upcast or not recipe.mixed else self.compute
        """Of what a linear layer makes."""
        self.read = self.compute if recipe.mixed else self.made
        """Of what attention reads."""
        self.capability = float(hardware.datasheet.compute_capability)

    @cached_property
    def kernel(self) -> Kernel:
        """What computes attention: eager's own code, a fused kernel, or sdpa's plain fallback, which keeps
        the scores (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""
        recipe, shape = self.recipe, self.shape
        if recipe.attention == "eager":
            return "eager"
        if shape.attention_softcap and recipe.attention == "sdpa":
            raise InputError(
                f"attention: sdpa: {shape.family} caps its attention scores, which sdpa cannot; "
                "set attention: eager."
            )
        if recipe.flash_package or (self.read == 2 and self.capability >= 8):
            return "fused"
        grouped = shape.heads != shape.kv_heads and not self.masked
        return "plain" if grouped or recipe.compute_dtype == "bf16" else "fused"

    @property
    def masked(self) -> bool:
        """Whether sdpa is given a mask: for packed documents, or a window shorter than the sequence."""
        if self.recipe.flash_package or self.recipe.attention == "eager":
            return False
        window = self.shape.sliding_window
        slides = any(block.mixer == "sliding" for block in self.shape.blocks)
        return self.recipe.packing or bool(slides and window and window < self.recipe.seq_len)

    # one block ------------------------------------------------------------------------------------------

    def kept_by(self, block: Block) -> list[Term]:
        """What one block of this kind keeps for backward when nothing is recomputed."""
        matrices = matrices_of(self.shape, block)
        mixes = {"in", "out", "low"}
        mixing = [m for m in matrices if m.role in mixes]
        reads = [m for m in mixing if m.role == "in"]
        terms: list[Term] = []
        if block.mixer != "none":
            terms += self._norm("norm before attention", reads)
            terms += self._mixed(block, mixing)
        if block.feed != "none":
            feeds = [m for m in matrices if m.role == "up"]
            second = not self.shape.parallel_residual or self.shape.norms > 1
            terms += self._norm("norm before the MLP", feeds) if second else self._read("its output", "B·S·H", feeds)
            terms += self._fed(block, matrices)
        if block.mixer != "none" and block.feed != "none":
            for _ in range(self.shape.norms - 2):
                terms += self._norm("norm after", [])
        if self.shape.residual_dropout:
            terms.append(self._term("masks of dropout", "B·S·H", 1, "native_dropout", 2))
        return terms

    def _term(self, name: str, dims: str, width: float, keeper: str, times: int = 1) -> Term:
        return self.dims.term("", name, dims, width, keeper, times)

    def _norm(self, name: str, readers: Sequence[Matrix], dims: str = "B·S·H") -> list[Term]:
        """A norm, and what the layers that read it keep of its output."""
        trained = self.recipe.trains_base
        if self.recipe.compile:  # one kernel, computed again from its input
            return [self._term(f"{name}: input", dims, self.residual, "the norm")]
        if self.shape.layer_norm:
            width = 4 if self.recipe.mixed else self.residual
            terms = [self._term(f"{name}: input", dims, width, "LayerNorm, which keeps its input")]
        else:
            terms = [self._term(f"{name}: input in fp32", dims, 4, "RMSNorm: x², x·1/rms")]
            if trained:
                terms.append(self._term(f"{name}: x/rms", dims, self.residual, "the gradient of its weight"))
        return terms + self._read(f"{name}: output", dims, readers, self.residual)

    def _read(
        self, name: str, dims: str, readers: Sequence[Matrix], width: int | None = None, *, kept: bool = False
    ) -> list[Term]:
        """What linear layers keep of the tensor they read, of `width` bytes an element; `kept`: somebody else
        keeps it already."""
        recipe, built = self.recipe, self.built
        width = width or self.made
        if recipe.compile or not readers:
            return []
        terms: list[Term] = []
        if recipe.trains_base:
            casts = recipe.mixed and width != self.compute  # anew for every product
            if casts or not kept:
                times = len(readers) if casts else 1
                terms.append(self._term(name, dims, self.compute if casts else width, "products, for weights", times))
            return terms
        if recipe.quantization == "int8" and not kept:
            terms.append(self._term(name, dims, width, "MatMul8bitLt, in its ctx"))
            kept = True
        adapted = [m for m in readers if m.name in built.adapted]
        if not adapted or recipe.adapter == "ia3":
            return terms
        wide = self.compute if recipe.mixed else SIZES[built.adapter_dtype(adapted[0])]
        if recipe.lora_dropout:
            terms.append(self._term(f"{name}: mask of dropout", dims, 1, "native_dropout", len(adapted)))
        own = wide != width or recipe.lora_dropout > 0  # a copy for each adapted layer
        if own or not kept:
            terms.append(self._term(f"{name} for A", dims, wide, "LoRA's A", len(adapted) if own else 1))
        return [*terms, self._term("A x", "B·S·R", wide, "LoRA's B", len(adapted))]

    def _mixed(self, block: Block, matrices: Sequence[Matrix]) -> list[Term]:
        out = [m for m in matrices if m.role == "out"]
        match block.mixer:
            case "attention" | "sliding":
                return self._attention(block, out[0])
            case "ssm and attention":
                return self._attention(block, out[-1]) + self._ssm() + self._read("output", "B·S·Z", out[:1])
            case "ssm":
                return self._ssm() + self._read("output", "B·S·Z", out)
            case "delta":
                return self._delta() + self._read("output", "B·S·Z", out)
            case "scan":
                what = "mamba's slow_forward: states, step by step"
                states = self._term("A, B x and states of every token", "B·S·Z·Q", 4, what, 4)
                return [states, self._term("gate, x, steps", "B·S·Z", 4, what, 8), *self._read("output", "B·S·Z", out)]
            case "conv":
                parts = self._term("B, C, x and their products", "B·S·H", self.made, "Lfm2ShortConv", 5)
                return [parts, *self._read("output", "B·S·H", out)]
            case _:
                states = self._term("gates and states", "B·S·Z", 4, "RecurrentGemmaRglru", 16)
                return [states, *self._read("output", "B·S·Z", out)]

    def _attention(self, block: Block, out: Matrix) -> list[Term]:
        shape, width, terms = self.shape, self.read, []
        if shape.kv_rank:
            terms += self._norm("norm of latents", [Matrix("self_attn.kv_b_proj", 1, 1, "low")], "B·S·K")
        if shape.qk_norm:
            terms += [
                *self._norm("norm of q", [], "B·S·N·D"),
                *self._norm("norm of k", [], "B·S·G·D"),
            ]
        masked = self.masked and (block.mixer == "sliding" or self.recipe.packing)
        repeated = "N" if masked or shape.kv_rank or self.kernel != "fused" else "G"
        if self.kernel == "fused":
            terms += [
                self._term("q rotated", "B·S·N·D", width, "attention"),
                self._term("k rotated", f"B·S·{repeated}·D", width, "attention"),
                self._term("v", f"B·S·{repeated}·U", width, "attention"),
                self._term("attention's output", "B·S·N·U", width, "attention (arXiv 2307.08691)"),
                self._term("log-sum-exp", "B·S·N", 4, "attention"),
            ]
            if masked:
                terms.append(self._term("mask to add", "S·S", width, "attention"))
            return terms + self._read("attention's output", "B·S·N·U", [out], width, kept=True)
        if self.kernel == "plain":
            width = 4
        terms += [
            self._term("q, k and v of every head", "B·S·N·D", width, "the two products of attention", 3),
            self._term("softmax", "B·N·S·S", 4 if shape.family != "gpt2" or self.recipe.mixed else width, "softmax"),
        ]
        if self.kernel == "eager" and width != 4 and shape.family != "gpt2":
            terms.append(self._term("weights", "B·N·S·S", width, "their product with v"))
        if shape.attention_softcap:
            terms.append(self._term("tanh of scores", "B·N·S·S", width, "tanh"))
        if shape.attention_dropout:
            terms.append(self._term("mask and weights dropped", "B·N·S·S", 1 + width, "native_dropout"))
        return terms + self._read("attention's output", "B·S·N·U", [out], self.read)

    def _delta(self) -> list[Term]:
        """Linear attention with a state, as transformers writes it in PyTorch."""
        what = "torch_chunk_gated_delta_rule"
        return [
            self._term("q, k, v, gates and norms", "B·S·Z", 4, what, 14),
            self._term("decays and scores of a chunk", "B·S·M·C", 4, what, 8),
            self._term("its triangular inverse, row by row", "B·S·M·C·C", 4 / 3, what),
        ]

    def _ssm(self) -> list[Term]:
        """Mamba-2 as transformers writes it in PyTorch, without the mamba-ssm package."""
        what = "Mamba-2's torch_forward"
        return [
            self._term("gate, x, convolved and scaled", "B·S·Z", 4, what, 8),
            self._term("B and C of every head", "B·S·M·Q", 4, what, 3),
            self._term("decays and scores of a chunk", "B·S·M·C", 4, what, 5),
        ]

    def _fed(self, block: Block, matrices: Sequence[Matrix]) -> list[Term]:
        down = [m for m in matrices if m.role == "down"]
        if block.feed == "dense":
            return self._mlp("B·S·I", down, self.made)
        terms = self._experts(matrices)
        return terms + (self._mlp("B·S·J", down, self.made) if down else [])

    def _mlp(self, dims: str, down: Sequence[Matrix], width: int) -> list[Term]:
        shape = self.shape
        many = _KEPT_BY_ACTIVATION.get(shape.activation, 1)
        if not shape.gated:
            terms = [self._term("up", dims, width, shape.activation, many)] if many else []
            return terms + self._read("activation", dims, down, width)
        terms = [self._term("gate and up", dims, width, "activation, product", 1 + many)]
        if self.recipe.compile:
            return terms
        terms.append(self._term("activation", dims, width, "its product with up"))
        return terms + self._read("gated", dims, down, width)

    def _experts(self, matrices: Sequence[Matrix]) -> list[Term]:
        """A token's row goes to each of its experts (transformers/integrations/moe.py). Grouped products are
        not on autocast's lists."""
        recipe, built = self.recipe, self.built
        stacked = [m for m in matrices if m.stacked > 1]
        width = self.residual
        keeps = recipe.trains_base or any(m.name in built.adapted for m in stacked)
        what = "grouped_mm_experts_forward"
        terms = [self._term("rows of experts", "B·S·X·H", width, what)] if keeps else []
        terms.append(self._term("gate, up and activation", "B·S·X·F", width, what, 3 if self.shape.gated else 2))
        if keeps:
            terms.append(self._term("gated", "B·S·X·F", width, what))
        terms.append(self._term("rows out of experts", "B·S·X·H", width, "their product with the share"))
        terms.append(self._term("chances", "B·S·E", 4, "the router's softmax", 2))
        whole = sum(m.elements for m in stacked) // recipe.tp
        if any(built.storage(m) for m in stacked):
            formula, source = f"{whole:,} × {self.compute} B", "bitsandbytes' parametrization, kept by products"
            terms.append(Term("", "experts dequantized", formula, whole * self.compute, source))
        elif any(m.name in built.adapted for m in stacked):
            formula, source = f"{whole:,} × {width} B", "W + B A, made whole (peft's ParamWrapper)"
            terms.append(Term("", "experts with their adapters", formula, whole * width, source))
        return terms

    def passing(self, block: Block) -> int:
        """The most that a block's backward holds for a moment beside what it keeps: gradients of the widest
        tensors; with LoRA in fp32, those of both branches."""
        d, recipe = self.dims.elements, self.recipe
        lora = recipe.adapter == "lora" and not recipe.mixed and recipe.adapter_dtype == "fp32"
        each = self.made + (4 if lora else self.made)
        widest = [0]
        if block.feed == "dense":
            widest.append(each * d("B·S·I"))
        if block.feed == "experts":
            widest.append(2 * self.residual * d("B·S·X·F") + (self.residual + 4) * d("B·S·X·H"))
        if block.mixer in ("attention", "sliding"):
            if self.kernel == "fused":
                fused = 4 * d("B·S·N·D") + 2 * self.read * (d("B·S·N·D") + d("B·S·N·U"))
                widest.append(fused)
            else:
                widest.append((8 + 2 * self.shape.attention_softcap * self.read) * d("B·N·S·S"))
        elif "ssm" in block.mixer:
            widest.append(2 * 4 * d("B·S·M·C") * max(self.numbers["Q"], self.shape.state_head_dim))
        elif block.mixer == "delta":
            widest.append(4 * 4 * d("B·S·Z"))
        elif block.mixer == "scan":
            widest.append(2 * 4 * d("B·S·Z·Q"))
        weights = [m for m in matrices_of(self.shape, block) if m.linear]
        whole = max((m.elements for m in weights if self.built.storage(m)), default=0) * self.compute
        return max(widest) + self.residual * d("B·S·H") + whole

    @property
    def block_input(self) -> Term:
        """What checkpointing keeps of a block."""
        return self._term("block input", "B·S·H", self.residual, "arXiv 1604.06174")

    # the loss -------------------------------------------------------------------------------------------

    @cached_property
    def kept_by_loss(self) -> list[Term]:
        """The last norm, the head's input and the log-probabilities."""
        terms = self._norm("final norm", [self.built.head])
        if self.recipe.fused_loss:
            return terms
        if self.recipe.compile:
            return [*terms, self._term("logits", "B·S·V", self.compute, LOSS)]
        terms.append(self._term("log-probabilities", "B·S·V", 4, LOSS))
        if self.shape.logit_softcap:
            terms.append(self._term("tanh of logits", "B·S·V", self.compute, "tanh"))
        return terms

    @cached_property
    def held_after_forward(self) -> list[Term]:
        """What the loss's local variables hold when forward ends."""
        if self.recipe.fused_loss:
            return self._fused
        terms = [self._term("hidden states", "B·S·H", self.residual, LOSS)]
        if self.recipe.compile:
            return terms
        if self.compute != 4:
            terms.append(self._term("logits", "B·S·V", self.compute, LOSS))
        return [*terms, self._term("logits in fp32", "B·S·V", 4, LOSS)]

    @cached_property
    def held_in_backward(self) -> list[Term]:
        """Gradients of logits, in the backward of the loss."""
        if self.recipe.fused_loss:
            return self._fused
        return [self._term("gradients in its backward", "B·S·V", 4, "log_softmax and nll_loss", 1 + (not self.recipe.compile))]

    @cached_property
    def _fused(self) -> list[Term]:
        """Liger's loss makes the logits of a chunk of tokens at a time, and both gradients in forward."""
        recipe, numbers, shape = self.recipe, self.numbers, self.shape
        tokens = self.dims.elements("B·S")
        chunk = -(-tokens // max(1, -(-numbers["V"] // numbers["H"])))
        chunk = min(tokens, 1 << (chunk - 1).bit_length())
        weight = shape.vocab * shape.hidden
        size = chunk * shape.vocab * self.compute
        terms = [
            self._term("gradient of the hidden states", "B·S·H", self.residual, LIGER),
            Term("", "one chunk of logits", f"{chunk:,}·{shape.vocab:,} × {self.compute} B", size, LIGER),
        ]
        if recipe.trains_base:
            width = SIZES[self.built.loose_dtype] + (self.compute if recipe.mixed else 0)
            terms.append(Term("", "gradient of the head", f"{weight:,} × {width} B", weight * width, LIGER))
        return terms


def total_kept(terms: list[Term]) -> int:
    """Bytes of what is kept."""
    return sum_of(terms)
