"""Facts that follow from a recipe's fields, each as a property with a name of its own."""

import math
from typing import Literal

from harness.recipe.fields import Fields

RECORDED_STEPS = 2
"""Steps of a measurement after the timed ones, whose memory is recorded: the second one begins with the
memory that a step leaves."""
BITSANDBYTES_OPTIMIZERS = ("adamw_8bit", "paged_adamw_8bit", "paged_adamw", "lion_8bit")


class Derived(Fields):
    """The fields of a recipe, and what follows from them."""

    @property
    def compute_dtype(self) -> Literal["fp32", "bf16", "fp16"]:
        """The dtype matrix products run in."""
        return self.precision.removesuffix("-mixed")  # type: ignore[return-value]

    @property
    def mixed(self) -> bool:
        """Whether the step runs under autocast."""
        return self.precision.endswith("-mixed")

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled by GradScaler."""
        return self.compute_dtype == "fp16"

    @property
    def trains_base(self) -> bool:
        """Whether the model's own weights are trained."""
        return self.adapter == "none"

    @property
    def adapts_every_linear(self) -> bool:
        """Whether every linear layer but the output head gets an adapter."""
        return not self.trains_base and self.lora_targets == "all-linear"

    @property
    def quantized(self) -> bool:
        """Whether bitsandbytes stores the frozen base."""
        return self.quantization != "none"

    @property
    def four_bit(self) -> bool:
        """Whether the frozen base is stored in 4 bit."""
        return self.quantization in ("nf4", "fp4")

    @property
    def flash_package(self) -> bool:
        """Whether a flash-attn package computes attention, whatever torch would choose."""
        return self.attention.startswith("flash_attention")

    @property
    def flex(self) -> bool:
        """Whether torch.compile makes attention's kernels, and a list of blocks is its mask."""
        return self.attention == "flex_attention"

    @property
    def masks_by_position(self) -> bool:
        """Whether attention knows documents by the positions of tokens, and by no mask of tokens."""
        return self.flash_package or self.flex

    @property
    def flash_capability(self) -> int:
        """The compute capability that training with the recipe's flash-attn package needs, 0 without one:
        Ampere's (transformers/modeling_flash_attention_utils.py, cuda_min_major_version), and for version 4
        Hopper's (flash_attn/cute/interface.py, _flash_attn_bwd)."""
        return (9 if self.attention == "flash_attention_4" else 8) if self.flash_package else 0

    @property
    def measured_steps(self) -> int:
        """How many steps a measurement runs."""
        return self.warmup_steps + self.steps + RECORDED_STEPS

    @property
    def packs_by_lengths(self) -> bool:
        """Whether a micro batch carries the lengths of its documents, so that no two have equal shapes."""
        return self.packing and self.flash_package

    @property
    def document_tokens(self) -> float:
        """How long the document is that a token is in, in the mean over the tokens of a row.

        A packed row is as synthetic ones are (data/rows.py): each document has up to half of seq_len tokens,
        all lengths alike, and the last one is cut off. With lengths as shares of seq_len, the sum of their
        squares over a row of x is f(x) = 2 * the integral over l from 0 to 1/2 of l**2 + f(x - l), or of x**2
        where l > x, of which f(1) = 4 - e**2 / 2.
        """
        return self.seq_len * (4 - math.e**2 / 2 if self.packing else 1)

    @property
    def packs_by_positions(self) -> bool:
        """Whether attention finds a row's documents by where positions begin anew."""
        return self.packing and self.flex

    @property
    def fused_loss(self) -> bool:
        """Whether Liger computes the loss from the hidden states, chunk by chunk."""
        return self.loss == "fused_linear"

    @property
    def tiles_mlps(self) -> bool:
        """Whether the MLP of each block computes a part of the sequence at a time."""
        return self.mlp_tiles > 1

    @property
    def chunked_loss(self) -> bool:
        """Whether PyTorch computes the loss from the hidden states, chunk by chunk."""
        return self.loss == "linear_cross_entropy"

    @property
    def by_trl(self) -> bool:
        """Whether TRL's output head computes the labels' log-probabilities, tile by tile."""
        return self.prefers or self.rewarded or self.loss == "fused_lm_head"

    @property
    def by_peft(self) -> bool:
        """Whether peft does more than a recipe's own fields say: another method, or fields of its config."""
        return bool(self.peft)

    @property
    def rewarded(self) -> bool:
        """Whether each row is an answer with an advantage over other answers to its prompt (GRPO)."""
        return self.task == "grpo"

    @property
    def whole_logits(self) -> bool:
        """Whether the loss holds the logits of all tokens at once."""
        return self.writes and self.loss == "standard"

    @property
    def dtypes_of_products(self) -> tuple[str, ...]:
        """The dtypes in which the device must be able to multiply matrices."""
        beside = [*(["fp8"] if self.fp8 else []), *(["bf16"] if self.by_muon else [])]
        return self.compute_dtype, *beside

    @property
    def by_liger(self) -> bool:
        """Whether norms, rotations and activations are Liger's kernels."""
        return self.kernels == "liger"

    @property
    def by_bitsandbytes(self) -> bool:
        """Whether the optimizer is bitsandbytes'."""
        return self.optimizer in BITSANDBYTES_OPTIMIZERS

    @property
    def by_muon(self) -> bool:
        """Whether Muon steps the hidden matrices, and AdamW the rest."""
        return self.optimizer == "muon"

    @property
    def low_rank_optimizer(self) -> bool:
        """Whether the optimizer keeps its moments of gradients that are projected to a lower rank."""
        return self.optimizer in ("galore_adamw", "apollo_adamw")

    @property
    def by_torchao(self) -> bool:
        """Whether the optimizer is torchao's, which compiles its step."""
        return self.optimizer.startswith("adamw_torch_")

    @property
    def pages_optimizer(self) -> bool:
        """Whether bitsandbytes keeps the optimizer's state in memory that pages between GPU and host."""
        return self.optimizer.startswith("paged_")

    @property
    def activations_on_host(self) -> bool:
        """Whether activations wait for backward in host memory."""
        return "activations" in self.offload

    @property
    def checkpoints_on_host(self) -> bool:
        """Whether the inputs of checkpointed blocks wait for backward in host memory."""
        return "checkpoints" in self.offload

    @property
    def blocks_on_host(self) -> bool:
        """Whether what blocks keep for backward waits in host memory."""
        return self.activations_on_host or self.checkpoints_on_host

    @property
    def parameters_on_host(self) -> bool:
        """Whether the model lives in host memory, and the optimizer with it."""
        return "parameters" in self.offload

    @property
    def optimizer_on_host(self) -> bool:
        """Whether the optimizer steps in host memory: alone, or with the parameters."""
        return "optimizer" in self.offload or self.parameters_on_host

    @property
    def steps_on_host(self) -> bool:
        """Whether the optimizer steps in host memory, by `offload` or by FSDP2."""
        return self.optimizer_on_host or self.cpu_offload

    @property
    def prefers(self) -> bool:
        """Whether the model learns which answers are likelier than its reference says."""
        return self.task in ("dpo", "kto")

    @property
    def unpaired(self) -> bool:
        """Whether good and bad answers are not paired by prompt, and are also read behind other prompts."""
        return self.task == "kto"

    @property
    def pairs(self) -> bool:
        """Whether a micro batch consists of pairs: of two answers, or of two texts that belong together."""
        return self.task in ("dpo", "orpo", "reward", "embedding")

    @property
    def compares(self) -> bool:
        """Whether examples are pairs, or answers that are marked good or bad."""
        return self.pairs or self.unpaired

    @property
    def unit(self) -> str:
        """What micro_batch_size counts: "pair" or "row". The plural takes an s."""
        return "pair" if self.pairs else "row"

    @property
    def by_odds(self) -> bool:
        """Whether the model learns to write the chosen of two answers and to prefer it by its odds (ORPO)."""
        return self.task == "orpo"

    @property
    def scores(self) -> int:
        """Outputs of the head that scores rows, in the place of the language model's head; 0 without one."""
        return {"classification": self.num_labels, "reward": 1}.get(self.task, 0)

    @property
    def embeds(self) -> bool:
        """Whether the model has no head, and a text's embedding is its last token's state."""
        return self.task == "embedding"

    @property
    def forward_passes(self) -> int:
        """How many forward passes a micro batch takes, each with an equal part of its rows."""
        return 2 if self.embeds else 1

    @property
    def by_row(self) -> bool:
        """Whether a row is learned as a whole: no token has a label."""
        return self.embeds or self.scores > 0

    @property
    def head_outputs(self) -> int | None:
        """Outputs of the head for each token: None for those of the vocabulary, 0 without a head."""
        return self.scores if self.by_row else None

    @property
    def writes(self) -> bool:
        """Whether the model learns to write the data's text."""
        return self.task == "sft"

    @property
    def computes_reference(self) -> bool:
        """Whether each step computes the reference's log-probabilities."""
        return self.prefers and self.dpo_reference == "computed"

    @property
    def copies_reference(self) -> bool:
        """Whether the reference is a frozen copy of the model. With an adapter it is the model without it."""
        return (self.computes_reference or self.regularized) and self.trains_base

    @property
    def regularized(self) -> bool:
        """Whether answers with rewards are compared with what a reference says of them."""
        return self.rewarded and self.grpo_beta > 0

    @property
    def rows(self) -> int:
        """Sequences in one forward and backward; a pair is two."""
        return self.micro_batch_size * (2 if self.pairs else 1)

    @property
    def tokens_per_step(self) -> int:
        """Tokens (padding included) that one optimizer step consumes on a rank."""
        return self.rows * self.seq_len * self.gradient_accumulation_steps

    @property
    def ddp(self) -> bool:
        """Whether DDP keeps a whole model on every rank and sums gradients in buckets."""
        return self.parallel == "ddp"

    @property
    def fsdp(self) -> bool:
        """Whether FSDP2 divides weights, gradients and optimizer states among ranks."""
        return self.parallel in ("fsdp", "fsdp+tp")

    @property
    def tensor_parallel(self) -> bool:
        """Whether ranks share the layers of one copy of the model."""
        return self.parallel in ("tp", "fsdp+tp")

    @property
    def distributed(self) -> bool:
        """Whether the step runs under torch.distributed, even with a single rank."""
        return self.parallel != "none"

    @property
    def head_apart(self) -> bool:
        """Whether FSDP gathers the output head as a unit of its own."""
        return self.wrap != "block"

    @property
    def syncs_per_step(self) -> int:
        """How often one optimizer step sums gradients over ranks."""
        return self.gradient_accumulation_steps if self.sync_each_micro_batch else 1

    @property
    def world_size(self) -> int:
        """The number of ranks: one process and one GPU each."""
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def data_parallel_ranks(self) -> int:
        """The number of ranks, or of groups of `tp` ranks, that train on rows of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def global_tokens_per_step(self) -> int:
        """Tokens (padding included) that all ranks together consume in one optimizer step."""
        return self.tokens_per_step * self.data_parallel_ranks
