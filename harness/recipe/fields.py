"""The fields of a recipe: every toggle of a fine-tuning step, typed."""

from typing import Annotated, Any, Literal

from pydantic import Field

from harness.recipe.values import (
    Adapter,
    Attention,
    Count,
    Fraction,
    Offload,
    Optimizer,
    Parallel,
    Positive,
    Precision,
    Quantization,
    Task,
    Values,
    Wrap,
)


class Fields(Values):
    """Every field alone: types, ranges, defaults. Whether they work together is Recipe's to say."""

    model: Annotated[str, Field(min_length=1)]
    """Name in recipes/models, path to a config.json or a checkpoint folder, or a Hugging Face id."""
    weights: Literal["random", "pretrained"] = "random"
    """Memory and time do not depend on the values, so random needs no download."""
    trust_remote_code: bool = False
    """Let the checkpoint's own Python code run. It can do anything; off unless you trust its author."""

    data: Annotated[str, Field(min_length=1)] = "synthetic"
    """`synthetic`, a path to a .txt, .jsonl, .json or .parquet file, or a Hugging Face dataset id."""
    packing: bool = False
    """Fill every sequence with whole documents that cannot attend to each other."""

    task: Task = "sft"
    """What is learned. sft: to write the data's text. dpo: to prefer the chosen of two answers, as TRL's
    DPOTrainer learns it (the extra `dpo`, as for the next three); a micro batch is pairs then, of two rows
    each. kto: good answers from bad ones, as TRL's KTOTrainer. orpo: to write the chosen of two answers and
    prefer it by its odds, as TRL's experimental ORPOTrainer. grpo: by rewards of the model's own answers, as
    TRL's GRPOTrainer learns once they are there. reward: to score the chosen of two
    higher, as TRL's RewardTrainer. classification: which class a text is of. These two have a head of
    scores in the place of the vocabulary's. embedding: to tell which of two texts belong together, by their
    last tokens' states, as sentence-transformers' MultipleNegativesRankingLoss; without a head."""
    num_labels: Annotated[int, Field(ge=2, lt=2**31)] = 2
    """classification: how many classes there are."""
    dpo_reference: Literal["computed", "precomputed"] = "computed"
    """dpo, kto: where the reference's log-probabilities come from. computed: forward passes in each step, of
    a frozen copy of the model, or of the model without its adapter. precomputed: with the data."""
    dpo_beta: Positive = 0.1
    """dpo, kto: how much a departure from the reference costs. orpo: how much the odds count."""

    grpo_beta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """grpo: how much a departure from the reference costs, whose log-probabilities come with the answers. 0:
    there is no reference."""

    images: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Of a model that sees: images in each row, whose tokens are among its seq_len."""
    image_size: Annotated[tuple[Count, ...], Field(max_length=2)] = ()
    """Height and width in pixels of an image, or one number for both, within the limits that the model's
    processor keeps to. [] is for models that resize every image to one size."""
    train_vision: bool = False
    """Train the image tower and its projector too, or adapt them; false: both are frozen as they are."""

    precision: Precision = "bf16"
    """Plain: weights in that dtype. `-mixed`: autocast over fp32 weights (with an adapter: over the
    frozen base as it is). fp16 and fp16-mixed train with GradScaler."""
    master_weights: bool = False
    """With 16-bit weights, the optimizer keeps an fp32 copy: 2+2+4+4+4 = 16 bytes a parameter."""

    fp8: bool = False
    """torchao's float8 training: every linear layer but the output head multiplies in fp8, each factor with
    one scale. Weights, gradients and what is kept for backward stay as they are."""

    quantization: Quantization = "none"
    """Storage of the frozen base's linear layers and experts, by bitsandbytes. Its fp4 is neither MXFP4 nor
    NVFP4, in which transformers trains nothing."""
    double_quant: bool = False
    """Quantize the 4-bit block scales as well."""
    upcast_for_kbit: bool = False
    """peft's prepare_model_for_kbit_training: every 16-bit weight left is upcast to fp32."""

    adapter: Adapter = "none"
    """Train small added weights instead of the model's own. peft: the method that `peft` names."""
    lora_rank: Count = 16
    """Inner size of each pair of added matrices: (rank, in) and (out, rank)."""
    lora_alpha: Positive = 32
    """The added product is multiplied by lora_alpha / lora_rank."""
    lora_dropout: Fraction = 0.0
    """Probability of dropping an input of the added matrices."""
    lora_targets: Literal["all-linear"] | tuple[Annotated[str, Field(min_length=1)], ...] = "all-linear"
    """`all-linear` (every linear layer but the output head) or a list of module names. ia3 uses it too."""
    use_rslora: bool = False
    """The added product is multiplied by lora_alpha / the root of lora_rank."""
    use_dora: bool = False
    """Train the length of each row of the adapted weights as well, and LoRA turns the rows."""
    lora_plus_ratio: Positive | None = None
    """LoRA+: the learning rate of B over that of A, which is `learning_rate`; null: both learn alike."""
    peft: dict[str, Any] = {}  # noqa: RUF012  (pydantic copies it)
    """More fields of peft's own config for the adapter, as `{init_lora_weights: gaussian}`; with adapter:
    peft also its `peft_type`, as `{peft_type: VERA, r: 256}`."""
    adapter_dtype: Literal["fp32", "base"] = "fp32"
    """fp32 (peft's default on a 16-bit base) or the dtype of the base."""

    gradient_checkpointing: bool = False
    """Also called activation checkpointing: keep each block's input, recompute the rest in backward."""
    selective_checkpointing: bool = False
    """With gradient_checkpointing: keep what matrix products and attention made as well, by PyTorch's
    selective checkpointing, and compute only the cheap rest again."""
    attention: Attention = "sdpa"
    """On CUDA, sdpa means the kernel torch would choose for these shapes."""
    loss: Literal["standard", "fused_linear", "linear_cross_entropy", "fused_lm_head"] = "standard"
    """The others never hold all the logits. fused_linear: Liger's fused linear cross-entropy.
    linear_cross_entropy: PyTorch's own. fused_lm_head: TRL's head, which its SFTTrainer trains with."""
    kernels: Literal["standard", "liger"] = "standard"
    """liger: norms, rotations and the MLP's activation by Liger's Triton kernels; its loss is `loss`'s."""
    mlp_tiles: Count = 1
    """The MLP of each block computes one of so many parts of the sequence at a time, and again in backward,
    by Liger's tiled MLP: it keeps its input alone, and makes room for one part. 1: all tokens at once."""

    optimizer: Optimizer = "adamw"
    """The 8-bit and paged ones, and lion_8bit, are bitsandbytes'; the others are torch's. muon: Muon on
    matrices within the model; embeddings, head, vectors and stacked experts are AdamW's.
    adamw_schedule_free: the package schedulefree's. galore_adamw, apollo_adamw: galore-torch's and
    apollo-torch's, on linear layers. adamw_torch_8bit, adamw_torch_4bit: torchao's."""
    optimizer_rank: Count = 128
    """galore_adamw, apollo_adamw: dimensions that a linear layer's gradient is projected to."""
    optimizer_impl: Literal["foreach", "fused", "for_loop"] = "foreach"
    """How torch's own optimizers run; bitsandbytes always goes tensor by tensor."""
    optimizer_in_backward: bool = False
    """Step each parameter as its gradient arrives, then free the gradient."""

    offload: tuple[Offload, ...] = ()
    """What lives in host memory and visits the GPU when needed. checkpoints: what gradient_checkpointing
    keeps, the inputs of blocks, as with transformers' `offload`. activations: all that waits for backward."""
    compile: bool = False
    """Run the model through torch.compile."""
    activation_memory_budget: Annotated[float, Field(ge=0, le=1)] = 1.0
    """With compile: the part of what the compiled model would keep for backward that it may keep. The rest it
    computes again, as PyTorch's setting of this name has the compiler choose."""

    parallel: Parallel = "none"
    """What divides the step among ranks, one process and one GPU each. ddp: every rank holds the whole model.
    fsdp: every rank holds a part of each weight, gradient and optimizer state, and gathers a unit of layers
    when it is needed. tp: every rank computes a part of each layer. fsdp+tp: both."""
    dp_replicate: Count = 1
    """Copies of the model that train on rows of their own. `run --gpus N` sets it to N for ddp."""
    dp_shard: Count = 1
    """Ranks that share the parts of one copy, each on rows of its own. `run --gpus N` fills it for fsdp."""
    tp: Count = 1
    """Ranks that share the layers of one copy, on the same rows. `run --gpus N` sets it to N for tp."""
    reshard_after_forward: bool = True
    """fsdp: free a gathered unit after its forward and gather it again for its backward; false: keep it."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """fsdp: dtype in which gradients are summed over ranks; null: the one they are computed in."""
    sync_each_micro_batch: bool = True
    """ddp, fsdp: sum gradients over ranks after every micro batch; false: once a step, which sends less and
    makes every fsdp rank hold the gradients of whole weights until then."""
    wrap: Wrap = "block"
    """fsdp: which layers are gathered together. block: each decoder block, all else with the model.
    accelerate, transformers: as these libraries lay them out."""
    cpu_offload: bool = False
    """fsdp: a rank's part of weights, gradients and optimizer state lives in host memory and is stepped
    there."""

    micro_batch_size: Count = 1
    """Sequences in one forward and backward; of a task that learns from pairs, pairs of them."""
    gradient_accumulation_steps: Count = 1
    """Micro batches in one optimizer step."""
    seq_len: Annotated[int, Field(ge=2, lt=2**31)] = 2048
    """Tokens in a sequence, padding included."""
    max_grad_norm: Positive | None = None
    """Clip the global gradient norm to this; null: no clipping."""
    learning_rate: Annotated[float, Field(gt=0, lt=1e20, allow_inf_nan=False)] = 1e-4
    """Constant over the run."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Decoupled, as in AdamW, where the optimizer has it."""
    warmup_steps: Annotated[int, Field(ge=0, lt=2**31)] = 2
    """Steps run before the first timed step."""
    steps: Count = 5
    """Timed steps."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of the random weights, the order of the data and dropout."""

    checkpoint_every: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Write a checkpoint to the run folder after every so many steps; 0: never."""
    on_nan: Literal["stop", "continue"] = "stop"
    """When a step's loss is nan or infinite: stop the run, or go on and record it."""
