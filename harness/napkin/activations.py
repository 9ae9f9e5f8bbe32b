"""What autograd keeps of a micro batch from forward to backward, term by term, and the loss. No torch.

Which operator keeps what is in PyTorch's tools/autograd/derivatives.yaml, how a layer consists of operators
in transformers' models/*/modeling_*.py, and what LoRA adds in peft/tuners/lora/layer.py. Korthikanti et al.
(arXiv 2205.05198, section 4.1) count the same way for GPT with fused kernels: 34·S·B·H bytes per block.
"""

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Literal, NamedTuple

from harness.architecture import Block, Matrix, matrices_of
from harness.hardware import Hardware
from harness.kernel_time import causal_length
from harness.napkin.scans import SCANS
from harness.napkin.terms import Dims, Term, sum_of
from harness.napkin.weights import SIZES, BuiltModel

LOSS = "transformers/loss/loss_utils.py, ForCausalLMLoss"
DEQUANTIZED = "bitsandbytes.nn.parametrize"
IN_CTX = "MatMul8bitLt, in its ctx, which checkpointing does not reach"
SELECTIVE = "torch.utils.checkpoint, create_selective_checkpoint_contexts"
LIGER = "arXiv 2410.10989; liger_kernel/ops/fused_linear_cross_entropy.py"
TILES = "liger_kernel/ops/tiled_mlp.py"
CHUNKED = "torch/nn/modules/linear_cross_entropy.py"
SCORES = "transformers/modeling_layers.py, GenericForSequenceClassification"
TRL = "trl/kernels/chunked_logprob.py"
ODDS = "trl/experimental/orpo/orpo_trainer.py, concatenated_forward"
DORA = "peft/tuners/lora/dora.py"
TRL_TOKENS, TRL_WORDS = 4096, 32768
"""The size of TRL's tiles of logits, whatever the vocabulary (TOKEN_CHUNK_SIZE; trl/trainer/utils.py)."""
_KEPT_BY_ACTIVATION = {"gelu_new": 4, "gelu_fast": 4, "xielu": 4}
"""Tensors of the MLP's width that a nonlinearity keeps; others keep one, their input or ReLU its result."""
_SOFTMAX_AS_GIVEN = ("gpt2", "gpt_oss", "falcon")
"""Families whose attention code computes the softmax in the dtype of the scores, and not in fp32."""


class LossMemory(NamedTuple):
    """What the last norm, the head and the loss hold."""

    kept: list[Term]
    """Until backward."""
    at_end: list[Term]
    """In local variables, when forward ends."""
    in_backward: list[Term]
    """When backward begins: the gradients of logits, and what it makes with them."""


class Activations:
    """The bytes that one micro batch keeps on a rank for backward, and holds for a while."""

    def __init__(self, built: BuiltModel, hardware: Hardware) -> None:
        self.built, self.recipe, self.shape, self.hardware = built, built.recipe, built.shape, hardware
        self.dims, recipe = Dims(built), built.recipe
        self.recomputes, self.compiled = recipe.gradient_checkpointing, recipe.compile
        self.by_liger, self.in_chunks = recipe.by_liger, recipe.fused_loss or recipe.chunked_loss
        self.drops = recipe.lora_dropout > 0
        self.asked, self.keeps_products = recipe.attention, recipe.selective_checkpointing
        self.tiles, self.trains_base = recipe.mlp_tiles, recipe.trains_base
        self.compute = SIZES[recipe.compute_dtype]  # bytes of an element that a matrix product reads
        self.stream = self.compute if recipe.fsdp and recipe.mixed else SIZES[built.loose_dtype]
        """Bytes of an element of the residual stream. FSDP2's mixed precision gathers weights in 16 bit."""
        self.made = self.compute if recipe.mixed and built.loose_dtype == built.made_dtype else self.stream
        """Bytes of an element of a linear layer's output; a quantized one returns its input's dtype."""
        self.read = self.compute if recipe.mixed else self.made  # what attention reads
        masks = recipe.seq_len if recipe.packing and not recipe.masks_by_position else 0
        given = 1 + (not recipe.by_row) + recipe.packing  # ids, labels, positions
        given *= 1 + recipe.unpaired
        self.input_bytes = recipe.tokens_per_step * (8 * given + masks)
        sides = recipe.image_size or (0,)
        pixels = recipe.rows * recipe.gradient_accumulation_steps * recipe.images * sides[0] * sides[-1]
        self.input_bytes += pixels * 3 * 4  # colours in fp32
        window = self.shape.sliding_window
        self.block_input = self.dims.term("block input", "B·S·H", self.stream, "arXiv 1604.06174")
        self.short = window is not None and window < recipe.seq_len
        self.masked = recipe.attention == "sdpa" and (recipe.packing or self.short or self.compiled)
        """Whether sdpa gets a mask: for packed documents, a window shorter than the sequence, or while it is
        compiled (transformers/masking_utils.py)."""

    @cached_property
    def kernel(self) -> Literal["eager", "fused", "plain"]:
        """What computes attention: eager code, a fused kernel, or sdpa's plain fallback (sdp_utils.cpp)."""
        recipe, shape = self.recipe, self.shape
        if recipe.attention == "eager" or (shape.attention_softcap and not recipe.masks_by_position):
            return "eager"
        grouped = shape.heads != shape.kv_heads and not self.masked
        modern = float(self.hardware.datasheet.compute_capability) >= 8
        one_head = shape.family == "falcon" and grouped  # of keys, which no fused kernel takes
        if recipe.masks_by_position or (self.read == 2 and modern and not one_head):
            return "fused"
        return "plain" if grouped or recipe.compute_dtype == "bf16" else "fused"

    def seen(self, block: Block) -> float:
        """The share of a causal sequence's scores that attention computes in `block`. Where it knows windows
        and documents by positions it leaves out what nobody sees; with a mask of tokens it computes all."""
        if not self.recipe.masks_by_position:
            return 1.0
        window = self.shape.sliding_window if block.mixer == "sliding" else None
        return causal_length(self.recipe.document_tokens, window) / self.recipe.seq_len

    def as_if_trained(self) -> "Activations":
        """The same operators where every weight of the base trains, and so all that they compute is kept."""
        trained = copy(self)
        trained.trains_base = True
        return trained

    def kept_until_backward(self, block: Block) -> list[Term]:
        """What one block keeps until backward: all, or its input and what checkpointing does not reach."""
        terms = self.kept_by(block)
        if not self.recomputes:
            return terms
        return [self.block_input, *(t for t in terms if t.source == IN_CTX), *self.made_once(block)]

    def made_once(self, block: Block) -> list[Term]:
        """With selective checkpointing, the results of a block's matrix products and attention, which are
        kept. bitsandbytes' products are operators of its own, and are computed again."""
        terms, term = list[Term](), self.dims.term
        if not self.keeps_products:
            return terms
        for matrix in matrices_of(self.shape, block):
            rows = "B·S·X" if matrix.stacked > 1 else "B·S"
            made = f"{rows}·{matrix.outputs // (self.recipe.tp if matrix.role in ('in', 'up') else 1):,}"
            if not self.built.storage(matrix):
                terms.append(term(f"{matrix.name}: W x", made, self.compute, SELECTIVE))
            if matrix.name in self.built.adapted and self.built.lora:
                wide = self.width_of_adapter(matrix)
                terms.append(term("A x", "B·S·R", wide, SELECTIVE))
                terms.append(term(f"{matrix.name}: B A x", made, wide, SELECTIVE))
        if not block.attends:
            return terms
        width = 4 if self.kernel == "plain" else self.read
        terms.append(term("attention's output", "B·S·N·U", width, SELECTIVE))
        also = ("log-sum-exp", "B·S·N", 4) if self.kernel == "fused" else ("scores", "B·N·S·S", width)
        return [*terms, term(*also, SELECTIVE)]

    def made_again(self, block: Block) -> int:
        """The bytes that a block with checkpointing computes again in backward, of a forward pass."""
        again = max(sum_of(self.kept_by(block)) - sum_of(self.made_once(block)), 0)
        return self.recomputes * again // self.recipe.forward_passes

    def kept_by(self, block: Block) -> list[Term]:
        """What one block of this kind keeps for backward when nothing is recomputed."""
        shape, terms, roles = self.shape, list[Term](), dict[str, list[Matrix]]()
        for matrix in matrices_of(shape, block):
            roles.setdefault(matrix.role, []).append(matrix)
        if block.mixer != "none":
            terms += self._norm("norm before attention", roles["in"])
            terms += self._mixed(block, roles["out"])
            terms += [term for _ in range(shape.norms - 2) for term in self._norm("norm after", [])]
        if block.feed != "none":
            name, ups, downs = "norm before the MLP", roles.get("up", []), roles.get("down", [])
            if self.tiled(block):
                kept = self.dims.term("MLP's input", "B·S·H", self.stream, TILES)
                return [*terms, *self._norm(name, []), kept]
            shared = shape.parallel_residual and shape.norms == 1  # the same norm for both
            terms += self._read(f"{name}: output", ups, self.stream) if shared else self._norm(name, ups)
            terms += self._experts(roles["expert up"] + roles["expert down"]) if "expert up" in roles else []
            terms += self._mlp("B·S·J" if "expert up" in roles else "B·S·I", downs) if downs else []
        dropped = self.dims.term("masks of dropout", "B·S·H", 1, "native_dropout", 2)
        return [*terms, dropped] if shape.residual_dropout else terms

    def _norm(self, name: str, readers: Sequence[Matrix], dims: str = "B·S·H") -> list[Term]:
        """A norm, and what the layers that read it keep of its output."""
        term = self.dims.term
        if self.compiled or (self.by_liger and not self.shape.layer_norm):
            terms = [term(f"{name}: input", dims, self.stream, "one kernel, which computes it again")]
        elif self.shape.layer_norm:
            width = 4 if self.recipe.mixed else self.stream
            terms = [term(f"{name}: input", dims, width, "LayerNorm, which keeps its input")]
        else:
            terms = [term(f"{name}: input in fp32", dims, 4, "RMSNorm: x², x·1/rms")]
            if self.trains_base:  # Gemma multiplies before it casts
                width = 4 if self.shape.family.startswith("gemma") else self.stream
                terms.append(term(f"{name}: x/rms", dims, width, "the gradient of its weight"))
        return terms + self._read(f"{name}: output", readers, self.stream, dims)

    def _read(
        self, name: str, readers: Sequence[Matrix], width: int, dims: str = "B·S·H", *, kept: bool = False
    ) -> list[Term]:
        """What linear layers keep of their input, of `width` bytes an element. `kept`: another does. Compiled
        code keeps it too (is_materialized_backwards in torch/_functorch/partitioners.py), cast once."""
        recipe, built, term, terms = self.recipe, self.built, self.dims.term, list[Term]()
        adapted = [m for m in readers if m.name in built.adapted]
        if not readers:
            return []
        if self.trains_base:
            casts = recipe.mixed and width != self.compute  # autocast's, anew for every product
            times = len(readers) if casts and not self.compiled else 1
            own = term(name, dims, self.compute if casts else width, "products, for weights", times)
            return [] if kept and not casts else [own]
        if any(built.storage(m) == "int8" for m in readers) and (not kept or self.recomputes):
            terms, kept = [term(name, dims, width, IN_CTX)], True
        for matrix in [] if built.lora else adapted:  # what a scale's gradient needs
            scaled = ("for its scale", dims, 4) if matrix.role == "down" else None
            what, of, wide = scaled or ("unscaled", f"B·S·{matrix.outputs:,}", self.made)
            terms.append(term(f"{name if scaled else matrix.name} {what}", of, wide, "IA3"))
        if not adapted or not built.lora:
            return terms
        wide = self.width_of_adapter(adapted[0])
        if self.drops:
            terms.append(term(f"{name}: mask of dropout", dims, 1, "native_dropout", len(adapted)))
        own = wide != width or self.drops  # a copy for each adapted layer
        if own or not kept:
            copies = len(adapted) if self.drops or (own and not self.compiled) else 1
            terms.append(term(f"{name} for A", dims, wide, "LoRA's A", copies))
        terms.append(term("A x", "B·S·R", wide, "LoRA's B", len(adapted)))
        for matrix in adapted if built.lengths else []:
            each, made = (wide if self.drops else self.made) + wide, f"B·S·{matrix.outputs:,}"
            terms.append(term(f"{matrix.name}: W x and B A x", made, each, "DoRA's lengths"))
            if self.drops:  # W x is not the base's own then, but a product with W in A's dtype
                terms.append(term(f"{matrix.name} for W x", f"{matrix.elements:,}", wide, DORA))
        return terms

    def width_of_adapter(self, matrix: Matrix) -> int:
        """Bytes of an element that the adapter of `matrix` computes with."""
        return self.compute if self.recipe.mixed else SIZES[self.built.adapter_dtype(matrix)]

    def _mixed(self, block: Block, out: Sequence[Matrix]) -> list[Term]:
        own, _, also = block.mixer.partition(" and ")
        if own in ("attention", "sliding"):
            return self._attention(block, out)
        terms = [self.dims.term(*row) for row in SCANS[own]]
        terms += self._read("output", out[:1], self.made, "B·S·H" if own == "conv" else "B·S·Z")
        return terms + (self._attention(block, out[1:]) if also else [])

    def _attention(self, block: Block, out: Sequence[Matrix]) -> list[Term]:
        shape, width, term, terms = self.shape, self.read, self.dims.term, list[Term]()
        if shape.kv_rank:
            terms += self._norm("norm of latents", [Matrix("self_attn.kv_b_proj", 1, 1, "low")], "B·S·K")
        if shape.qk_norm:
            terms += self._norm("norm of q", [], "B·S·N·D") + self._norm("norm of k", [], "B·S·G·D")
        if shape.gated_attention:
            terms.append(term("gate, and what it multiplies", "B·S·N·D", self.made, "their product", 2))
        masked = self.masked and (self.compiled or block.mixer == "sliding" or not self.short)
        if self.kernel == "fused":
            heads = "N" if masked or shape.kv_rank else "G"
            expanded = heads == "N" and shape.heads != shape.kv_heads
            of_one = [m.role for m in matrices_of(shape, block)].count("in") == 1
            if of_one and not shape.positions and not expanded:  # v is a view of what the product made
                terms += [term("q and k beside v", f"B·S·{n}·D", width, "v") for n in "NG"]
            terms += [
                term("q rotated", "B·S·N·D", width, "attention"),
                term("k rotated", f"B·S·{heads}·D", width, "attention"),
                term("v", f"B·S·{heads}·U", width, "attention"),
                term("attention's output", "B·S·N·U", width, "attention (arXiv 2307.08691)"),
                term("log-sum-exp", "B·S·N", 4, "attention"),
            ]
            if masked and not self.compiled:  # then all blocks have the same one
                terms.append(term("mask to add", "S·S", width, "attention"))
            return terms + self._read("attention's output", out, width, "B·S·N·U", kept=True)
        wide = self.kernel == "plain" or shape.family not in _SOFTMAX_AS_GIVEN or self.recipe.mixed
        factors = 4 if self.kernel == "plain" else width
        from_scores = self.compiled and not self.recipe.mixed  # computed again from them, in their dtype
        terms += [
            term("q, k and v of every head", "B·S·N·D", factors, "the two products of attention", 3),
            term("softmax", "B·N·S·S", 4 if wide and not from_scores else width, "softmax"),
        ]
        if wide and factors != 4:
            terms.append(term("weights", "B·N·S·S", width, "their product with v"))
        if shape.attention_softcap:
            terms.append(term("tanh of scores", "B·N·S·S", width, "tanh"))
        if shape.attention_dropout:
            terms.append(term("mask and weights dropped", "B·N·S·S", 1 + width, "native_dropout"))
        return terms + self._read("attention's output", out, width, "B·S·N·U")

    def _mlp(self, dims: str, down: Sequence[Matrix]) -> list[Term]:
        shape, term = self.shape, self.dims.term
        many = 1 if self.compiled else _KEPT_BY_ACTIVATION.get(shape.activation, 1)
        if not shape.gated:
            read = self._read("activation", down, self.made, dims, kept=shape.activation == "relu")
            return [term("up", dims, self.made, shape.activation, many), *read]
        terms = [term("gate and up", dims, self.made, "activation, product", 1 + many)]
        if not self.by_liger and not self.compiled:
            terms.append(term("activation", dims, self.made, "its product with up"))
        return terms + self._read("gated", down, self.made, dims)

    def _experts(self, stacked: Sequence[Matrix]) -> list[Term]:
        """What a mixture keeps: a row for each token and each of its experts (integrations/moe.py)."""
        built, width, term = self.built, self.stream, self.dims.term
        adapted, what = any(m.name in built.adapted for m in stacked), "grouped_mm_experts_forward"
        own = 1 + self.shape.gated + (not self.compiled)
        terms = [
            term("gate, up and activation", "B·S·X·F", width, what, own),
            term("rows out of experts", "B·S·X·H", width, "their product with the share"),
            term("chances", "B·S·E", 4, "the router's softmax", 2),
        ]
        if self.trains_base or adapted:
            terms += [term("rows of experts", "B·S·X·H", width, what), term("gated", "B·S·X·F", width, what)]
        whole, quantized = sum(m.elements for m in stacked) // self.recipe.tp, built.storage(stacked[0])
        name, source = "experts with their adapters", "W + B A, made whole (peft's ParamWrapper)"
        if quantized:
            name, width, source = "experts dequantized", self.compute, DEQUANTIZED
        return [*terms, term(name, f"{whole:,}", width, source)] if quantized or adapted else terms

    def tiled(self, block: Block) -> bool:
        """Whether the block's MLP keeps its input alone, and is computed part by part, again in backward."""
        return self.recipe.tiles_mlps and block.feed == "dense"

    def kept_by_tiles(self, block: Block) -> int:
        """The bytes that all parts of the block's MLP keep, each for its own backward; 0 for a whole one."""
        downs = [matrix for matrix in matrices_of(self.shape, block) if matrix.role == "down"]
        return sum_of(self._mlp("B·S·I", downs)) if self.tiled(block) else 0

    def passing(self, block: Block) -> int:
        """The bytes that a block's backward makes: gradients of its widest tensors, a dequantized weight."""
        d, built, matrices = self.dims.of, self.built, matrices_of(self.shape, block)
        wide = built.lora and not self.recipe.mixed and built.adapter_dtype(matrices[0]) == "fp32"
        if block.feed == "experts":
            widest = [2 * self.stream * d("B·S·X·F") + (self.stream + 4) * d("B·S·X·H")]
        else:
            widest = [(self.made + (4 if wide else self.made)) * d("B·S·I") * (block.feed == "dense")]
        if self.tiled(block):  # what a part keeps for its own backward, beside the whole input's gradient
            kept = widest[0] + self.kept_by_tiles(block)
            widest = [kept // self.tiles + self.stream * d("B·S·H")]
        if not block.attends:
            widest.append(8 * d("B·S·Z·Q") if block.mixer == "scan" else 16 * d("B·S·Z"))
        elif self.kernel == "fused":  # the gradient of q is summed up in fp32
            widest.append(4 * d("B·S·N·D") + 2 * self.read * (d("B·S·N·D") + d("B·S·N·U")))
        else:
            widest.append((8 + 2 * self.shape.attention_softcap * self.read) * d("B·N·S·S"))
        whole = max((m.elements for m in matrices if m.linear and built.storage(m)), default=0)
        whole *= self.compute
        if built.lengths:
            # peft/tuners/lora/dora.py: an identity for B A 1, B A, W, s·B A and their sum, in A's dtype
            adapted = [m for m in matrices if m.name in built.adapted]
            wide_bytes = SIZES[built.adapter_dtype(matrices[0])]
            whole += max((m.inputs**2 + 4 * m.elements for m in adapted), default=0) * wide_bytes
        # a factor on its way to fp8: twice in fp32, or in one compiled kernel
        in_fp8 = [max(m.elements, d("B·S") * max(m.inputs, m.outputs)) for m in matrices if built.in_fp8(m)]
        whole += max(in_fp8, default=0) * (1 if self.compiled else 8)
        of_rows = max(widest) + self.stream * d("B·S·H")
        return of_rows // self.recipe.forward_passes + whole

    @cached_property
    def loss(self) -> LossMemory:
        """What the last norm, the head and the loss hold, by what computes the loss."""
        recipe, built, term, width = self.recipe, self.built, self.dims.term, self.compute
        norm, trains = self._norm("final norm", [built.head]), recipe.trains_base
        if recipe.by_trl:  # of each token its last state, and log-probability, entropy, mean, rank
            states = term("states of tokens with a label", "B·S·H", self.stream, TRL)
            numbers = term("numbers for the loss and its log", "B·S", 40, TRL)
            tokens = min(self.dims.of("B·S"), TRL_TOKENS)
            tile = term("one tile of logits", f"{tokens:,}·{TRL_WORDS:,}", width, TRL)
            gradient = term("gradient of the states, fp32 and cast", "B·S·H", 4 + self.stream, TRL)
            of_head = term("gradient of the head, fp32 and cast", "V·H", 4 + SIZES[built.loose_dtype], TRL)
            kept = [*self._norm("final norm", []), states, numbers]
            return LossMemory(kept, [tile, self._states(TRL)], [tile, gradient, *[of_head] * trains])
        if recipe.by_row:  # scores of every token are made, though a row's last token alone is read
            number, wide = recipe.scores, self.stream
            scores = [term("scores of all tokens", f"B·S·{number:,}", width, SCORES)] * (number > 0)
            read = [term("final norm: output", "B·S·H", wide, "the gradient of the head of scores")]
            read *= number > 0 and not trains
            return LossMemory([*norm, *read], [self._states(SCORES), *scores], scores)
        logits = "B·S·V"
        if recipe.by_odds:  # half of the rows are the chosen answers
            kept = [term("logits", logits, width, ODDS)]
            kept.append(term("log-probabilities of the chosen half", logits, width / 2, ODDS))
            held = [self._states(ODDS), term("logits of the chosen half", logits, width / 2, ODDS)]
            return LossMemory([*norm, *kept], held, [term("gradient of logits", logits, width, ODDS)])
        if self.in_chunks:
            held = self._in_chunks()
            return LossMemory(norm, held, held)
        if recipe.mixed and not recipe.fsdp and built.loose_dtype != recipe.compute_dtype:
            norm.append(term("the head in 16 bit", "V·H", width, "its product, under autocast"))
        name, wide = ("logits", width) if self.compiled else ("log-probabilities", 4)
        kept = [*norm, term(name, logits, wide, LOSS)]
        kept += [term("tanh of logits", logits, width, "tanh")] * self.shape.logit_softcap
        held = [self._states(LOSS)]
        if not self.compiled:
            held += [term("logits", logits, width, LOSS)] * (width < 4)
            held.append(term("logits in fp32", logits, 4, LOSS))
        times = 1 if self.compiled else 2
        gradients = term("gradients of logits", logits, 4, "log_softmax, nll_loss", times)
        return LossMemory(kept, held, [gradients])

    def _states(self, source: str) -> Term:
        return self.dims.term("hidden states", "B·S·H", self.stream, source)

    @property
    def chunk(self) -> int:
        """The tokens whose logits are made at a time: a power of two, of PyTorch half of Liger's."""
        tokens, parts = self.dims.of("B·S"), -(-self.shape.vocab // self.shape.hidden)
        length = 1 << (-(-tokens // parts) - 1).bit_length()
        return min(tokens, max(1, length // 2) if self.recipe.chunked_loss else length)

    def _in_chunks(self) -> list[Term]:
        """What the fused losses of Liger and PyTorch hold. They make a chunk of logits at a time, and both
        gradients in forward. In 16 bit PyTorch's has an fp32 copy."""
        term, wide, source = self.dims.term, self.compute, LIGER
        if self.recipe.chunked_loss:
            wide, source = 4 + wide * (wide == 2), CHUNKED
        width = SIZES[self.built.loose_dtype] + self.compute * self.recipe.mixed
        return [
            term("gradient of the hidden states", "B·S·H", self.stream, source),
            term("one chunk of logits", f"{self.chunk:,}·V", wide, source),
            *[term("gradient of the head", "V·H", width, source)] * self.recipe.trains_base,
        ]
