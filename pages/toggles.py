"""Every toggle of a recipe: the sweep that shows it, and in words what it buys and what it costs.

Numbers are not written here: they come from docs/data/<field>.json, which the sweep wrote.
"""

from dataclasses import dataclass
from typing import NamedTuple


class BuysAndCosts(NamedTuple):
    """Of a field that no sweep shows."""

    buys: str
    costs: str


SMALL = "llama-3.2-1b-bf16"
LORA = "llama-3.1-8b-lora"
QLORA = "llama-3.1-8b-qlora"


@dataclass(frozen=True)
class Toggle:
    """A field of a recipe and the command that shows what it does."""

    field: str
    recipe: str
    values: str
    buys: str
    costs: str
    more: str = ""
    """Other fields of the base, and options."""

    @property
    def command(self) -> str:
        """The whole command, as one types it."""
        more = f" {self.more}" if self.more else ""
        return f"harness sweep {self.recipe} {self.field}={self.values}{more} --png"


GROUPS: dict[str, list[Toggle]] = {
    "Size of a step": [
        Toggle(
            "micro_batch_size",
            SMALL,
            "1,2,4,8,16",
            "Larger products keep the GPU busier, and the optimizer's step is shared by more tokens.",
            "Activations grow in proportion, until the memory is full.",
        ),
        Toggle(
            "seq_len",
            SMALL,
            "512,1024,2048,4096,8192",
            "Longer contexts.",
            "Activations grow with the tokens as those of a larger batch do, and the work of attention with "
            "their square.",
        ),
        Toggle(
            "gradient_accumulation_steps",
            SMALL,
            "1,2,4,8",
            "A larger batch for the optimizer with the activations of one micro batch, and fewer optimizer "
            "steps a token.",
            "Gradients stay alive through every micro batch but the first.",
        ),
        Toggle(
            "packing",
            "llama-3.2-1b-packing",
            "false,true",
            "No padding: every token of a sequence is one to learn from. The figure counts all tokens, and "
            "with padding many of them teach nothing.",
            "Documents must not see each other, which takes an attention mask or positions that start again.",
        ),
    ],
    "Number formats": [
        Toggle(
            "precision",
            SMALL,
            "bf16,fp16,bf16-mixed,fp16-mixed,fp32",
            "16 bit halves weights, gradients, optimizer state and activations, and runs on the GPU's fast "
            "units. The mixed ones keep fp32 weights and compute in 16 bit.",
            "Plain 16 bit rounds small updates away; the mixed ones hold a 16-bit copy of the weights they "
            "use beside the fp32 ones. fp16 scales its loss to keep small gradients.",
        ),
        Toggle(
            "master_weights",
            SMALL,
            "false,true",
            "Small updates are not lost: the optimizer works on an fp32 copy of the 16-bit weights.",
            "The copy, and moments in fp32: 16 bytes a parameter in all.",
        ),
        Toggle(
            "quantization",
            LORA,
            "none,int8,nf4,fp4",
            "The frozen base takes a half (int8) or about a quarter (nf4, fp4) of its 16-bit size.",
            "4-bit layers are brought back to 16 bit whenever they are used; int8 ones quantize their input. "
            "An adapter is needed to train.",
        ),
        Toggle(
            "double_quant",
            QLORA,
            "false,true",
            "The scales of the 4-bit blocks are quantized too: about 0.4 bits a parameter.",
            "One more small step whenever a layer is used.",
        ),
        Toggle(
            "upcast_for_kbit",
            QLORA,
            "false,true",
            "Norms, embeddings and the head compute in fp32, as the paper of QLoRA does it.",
            "Embeddings and head take twice their bytes, and so do the logits' gradients on the way back.",
        ),
    ],
    "Adapters": [
        Toggle(
            "adapter",
            LORA,
            "lora,ia3,none",
            "Gradients and optimizer state of a small added part only; the base needs neither.",
            "The added layers' own activations and products. The base cannot change.",
        ),
        Toggle(
            "lora_rank",
            LORA,
            "8,16,64,256",
            "A larger rank can express more.",
            "Adapter weights, their gradients and moments grow in proportion.",
        ),
        Toggle(
            "lora_targets",
            LORA,
            "all-linear,q_proj+v_proj",
            "Fewer adapted layers keep fewer inputs and do fewer products.",
            "Fewer places where the model can change.",
        ),
        Toggle(
            "lora_dropout",
            LORA,
            "0,0.05,0.1",
            "Regularizes the adapter.",
            "A mask and a dropped copy of the input of every adapted layer. The probability does not matter.",
        ),
        Toggle(
            "use_dora",
            LORA,
            "false,true",
            "Trains how long the rows of a weight are apart from where they point (DoRA), which often learns "
            "more at the same rank.",
            "The length of every row is computed anew in each forward pass, from the whole weight in the "
            "adapter's dtype. What a layer and its adapter make is kept too, unless it is computed again.",
            "gradient_checkpointing=false",
        ),
        Toggle(
            "lora_plus_ratio",
            LORA,
            "null,16",
            "LoRA+: B learns this many times faster than A, which often needs fewer steps.",
            "Nothing. The two groups of weights are stepped one after the other, so that the optimizer's own "
            "temporaries are those of the larger.",
        ),
        Toggle(
            "adapter_dtype",
            LORA,
            "fp32,base",
            "In the base's dtype, inputs of adapted layers need no fp32 copy.",
            "The adapter is trained in 16 bit, where small updates are rounded away.",
        ),
    ],
    "Activations": [
        Toggle(
            "gradient_checkpointing",
            LORA,
            "false,true",
            "Of every block only the input is kept; the rest is computed again in backward. Also called "
            "activation checkpointing.",
            "Nearly one more forward pass.",
        ),
        Toggle(
            "attention",
            LORA,
            "eager,sdpa,flash_attention_2",
            "sdpa and flash attention never hold the square matrix of scores.",
            "Flash attention needs its package; eager needs nothing and pays with memory. flex_attention is "
            "PyTorch's own, compiled to kernels of about the speed of flash attention: it takes a list of "
            "blocks as a mask, so that packed documents cost no mask of tokens, and keeps the first call's "
            "tensors for as long as the process lives.",
            "gradient_checkpointing=false",
        ),
        Toggle(
            "loss",
            SMALL,
            "standard,fused_linear,linear_cross_entropy,fused_lm_head",
            "The logits, a number for each token and word of the vocabulary, are never held all at once. "
            "`fused_lm_head` is the head that TRL's SFTTrainer trains with, whether asked to or "
            "not.",
            "fused_linear: Liger's kernels (the extra `liger`). linear_cross_entropy: PyTorch 2.13, for "
            "models whose loss is that of their head's output and nothing more; it is rounded to the dtype "
            "of the weights. "
            "fused_lm_head: TRL (the extra `dpo`); the logits are computed once more in backward.",
            "micro_batch_size=4",
        ),
    ],
    "Optimizer": [
        Toggle(
            "optimizer",
            SMALL,
            "adamw,adamw_8bit,paged_adamw,paged_adamw_8bit,lion_8bit,adafactor,sgd",
            "Less state a parameter: two moments in the weights' dtype for AdamW, two bytes for 8-bit AdamW, "
            "one for 8-bit Lion, nearly none for Adafactor and SGD. Paged state can move to the host. `muon` "
            "keeps one moment of each matrix within the model and AdamW's two of the rest; "
            "`adamw_schedule_free` keeps two and needs no schedule. `galore_adamw` and `apollo_adamw` keep "
            "two of a linear layer's gradient in `optimizer_rank` dimensions. `adamw_torch_8bit` and "
            "`adamw_torch_4bit` are torchao's.",
            "Another optimizer is another training. Paged state moves over the host link when memory is "
            "short; it does not show in torch's counters. torchao's step makes 8 bytes an element of the "
            "largest weight for a moment, and in 4 bit 24, which may be more than its state saves; the first "
            "step of the first run tunes its kernels beside a buffer of the GPU's L2 cache, which stays "
            "reserved and is not simulated. GaLore decomposes every gradient in its first step and each "
            "200th; what cuSOLVER takes for that nobody says. In fp32 GaLore keeps all of a decomposition, "
            "not `optimizer_rank` of it.",
        ),
        Toggle(
            "optimizer_impl",
            SMALL,
            "foreach,fused,for_loop",
            "foreach updates all tensors in a few launches, fused in one pass over them.",
            "foreach holds temporaries as large as the parameters; for_loop launches much for every tensor.",
            "seq_len=256",
        ),
        Toggle(
            "optimizer_in_backward",
            SMALL,
            "false,true",
            "Each gradient is used and freed as it arrives: they are never there all together.",
            "No accumulation over micro batches and no clipping by the global norm.",
            "seq_len=256",
        ),
        Toggle(
            "max_grad_norm",
            SMALL,
            "null,1.0",
            "One bad batch cannot ruin the weights.",
            "All gradients are read once more, and wait for each other.",
        ),
        Toggle(
            "weight_decay",
            SMALL,
            "0,0.1",
            "Regularizes.",
            "One product for each parameter in the optimizer's step.",
        ),
    ],
    "Elsewhere than on the GPU": [
        Toggle(
            "offload",
            SMALL,
            "none,activations,optimizer,activations+optimizer,parameters",
            "What is not needed now lives in host memory. With gradient_checkpointing there is "
            "`checkpoints`, too: the inputs of blocks, as with transformers' own `offload`.",
            "It travels over the host link, which is many times slower than the GPU's memory; the optimizer "
            "steps on the host.",
        ),
        Toggle(
            "compile",
            SMALL,
            "false,true",
            "Fused kernels read and write less, and launch less.",
            "Minutes of compilation before the first step. Which kernels there are is the compiler's choice, "
            "so this sweep is the napkin's and not simulated.",
            "--napkin",
        ),
    ],
}
"""By what they change, in the order of the guide."""

WITHOUT_SWEEP: dict[str, BuysAndCosts] = {
    "task": BuysAndCosts(
        buys="dpo: the model learns to prefer the chosen of two answers. The step is TRL's DPOTrainer's, "
        "or for kto KTOTrainer's, with the log-probabilities that TRL computes in tiles, so no logits are "
        "held.",
        costs="A micro batch of so many pairs has twice as many rows, and each is read twice: by the model "
        "and by its reference. In full fine-tuning the reference is a second copy of the weights; with an "
        "adapter it is the model with the adapter off. A tile of logits has 32,768 words whatever the "
        "vocabulary, and the head's gradient is summed in fp32. An estimate's pairs are as long "
        "as seq_len, and every token but the first is learned from: the most that pairs of this length can "
        "take. kto reads good and "
        "bad answers, one a row, and each prompt with another's answer as well: two forward passes without "
        "gradients beside the two of dpo. orpo has no reference, and reads a pair once, with the logits of "
        "all its tokens and of the chosen a copy. grpo is one forward and one backward over answers that are "
        "there, with TRL's defaults: no reference without `grpo_beta`, and the probabilities they were drawn "
        "by are the model's own; generating them is not in the step. reward and "
        "classification have a head of scores, one or `num_labels`, where the vocabulary's was: no logits, "
        "no weight for them, and of a row the last token alone has a loss. Their peaks are those of TRL's "
        "RewardTrainer and transformers' Trainer but for what a test names "
        "(`tests/virtual_gpu/test_tasks.py`). With an adapter peft trains the head too. embedding has no "
        "head: a text is its last token's state, the two sides of the pairs are read in a pass each, and "
        "every other text of the micro batch is one to be told from. So a larger micro batch is another "
        "loss, which no accumulation of gradients stands for.",
    ),
    "kernels": BuysAndCosts(
        buys="liger: RMSNorm keeps its input in its own dtype and no copy in fp32, the MLP keeps gate and up "
        "and computes their product's part again, rotations are written in place. Fewer kernels read and "
        "write less.",
        costs="Triton and an NVIDIA GPU; a family that Liger has. Its loss is a toggle of its own, "
        "`loss: fused_linear`. Of its kernels' time an estimate knows the bytes of their tensors alone: each "
        "is read or written once. LayerNorm stays PyTorch's, and nothing is divided among ranks.",
    ),
    "mlp_tiles": BuysAndCosts(
        buys="An MLP keeps its input alone for backward, and makes room for a part of the sequence: Liger's "
        "tiled MLP (that of DeepSpeed's ALST, and of axolotl's `tiled_mlp`), around the MLP of each block as "
        "it is. Without checkpointing most of what a block keeps is the MLP's; with it and long rows the MLP "
        "is the largest part of what is computed again.",
        costs="The extra `liger`, and the MLP's forward once more. What is dropped, autocast, ranks and a "
        "step within backward exclude it, each with a sentence; a mixture's experts stay whole.",
    ),
    "activation_memory_budget": BuysAndCosts(
        buys="With `compile: true` the compiler may keep this part of what it would keep for backward, and "
        "computes the rest again, beginning with what is cheapest (PyTorch's own setting of this name).",
        costs="Products and attention are computed again. The compiler orders backward as it likes and may "
        "make much of it at once, so that the peak falls less than what is kept: napkin takes all to be "
        "there. `harness emulate` runs the compiled code itself.",
    ),
    "fp8": BuysAndCosts(
        buys="Products of linear layers at twice the FLOP/s of 16 bit, by torchao's float8 training, on Ada, "
        "Hopper and what followed. It saves no memory: weights, gradients, optimizer state and what is kept "
        "for backward stay as they are, and each factor is rounded anew for each product.",
        costs="torchao. In eager mode a factor passes through fp32 on its way, in many small kernels: the "
        "peak is higher, and what the products win is lost. With `compile: true`, which napkin alone "
        "estimates, it is one kernel. Every weight is trained: torchao computes a gradient for each that it "
        "multiplies. Stacked experts, the head and layers whose sizes are no multiples of 16 stay in 16 bit. "
        "Nobody's kernels in fp8 were fitted: their time is that of 16 bit at twice the rate.",
    ),
    "num_labels": BuysAndCosts(
        buys="With `task: classification`, how many classes a text can be of.",
        costs="A number for each class and each token, of which the last token's are read.",
    ),
    "optimizer_rank": BuysAndCosts(
        buys="With `optimizer: galore_adamw` or `apollo_adamw`: fewer dimensions, less state.",
        costs="A gradient is known less well.",
    ),
    "images": BuysAndCosts(
        buys="A model that sees (`harness simulate qwen2.5-vl-7b-lora`) reads so many images in each row. It "
        "is built by AutoModelForImageTextToText, and the pixels come with each batch, in fp32. Their "
        "tokens are among the row's `seq_len`, as many as the model's own processor makes of them, and "
        "have no label. [Which models](causal-models.md#models-that-see) can be asked about is a table.",
        costs="The tokens, like any others, and what the tower computes. With `images: 0` the model learns "
        "from text, with the tower in memory. Images have random pixels so far, and all are of one size.",
    ),
    "image_size": BuysAndCosts(
        buys="The size decides how many tokens an image is: one for each 28 x 28 pixels with Qwen2.5-VL, for "
        "each 32 x 32 with Qwen3-VL. It is a size within the limits of the processor, `min_pixels` and "
        "`max_pixels`.",
        costs="Tokens grow with the area, and the work of a tower's full attention with its square. Gemma 3 "
        "and LLaVA resize every image to one size, whatever this says.",
    ),
    "train_vision": BuysAndCosts(
        buys="The image tower and the projector behind it are trained too; with an adapter, their linear "
        "layers are adapted like the decoder's.",
        costs="Gradients and optimizer state of their weights, and what backward needs of every patch. A "
        "frozen tower keeps nothing of that, but for one case: with an adapter and gradient_checkpointing, "
        "peft and transformers mark the embeddings of every part as to be differentiated, the patches of "
        "SigLIP and Pixtral among them, and backward passes through those towers although nothing in them "
        "is trained.",
    ),
    "dpo_reference": BuysAndCosts(
        buys="precomputed: no copy of the weights, and no pass of the reference in a step.",
        costs="That pass was made before, over all of the data; its time is not in the step's.",
    ),
    "grpo_beta": BuysAndCosts(
        buys="More than 0: GRPO stays near a reference, as with TRL's `beta`.",
        costs="In full fine-tuning a second copy of the weights. What it says of the answers comes with "
        "them, as their rewards do: its pass is before the step, and not in the step's time.",
    ),
    "selective_checkpointing": BuysAndCosts(
        buys="With gradient_checkpointing: no product and no attention is computed twice. PyTorch's "
        "selective checkpointing keeps what they made and computes the cheap rest again.",
        costs="What products made stays. With LoRA on every linear layer that is nearly all there is: ask "
        "`harness simulate` before you believe a saving. bitsandbytes' 4-bit products are computed again. "
        "Inputs of blocks that wait in host memory are another way: gradient_checkpointing with "
        "`offload: [checkpoints]`.",
    ),
    "peft": BuysAndCosts(
        buys="With adapter: lora, what peft's LoraConfig has besides: `peft={init_lora_weights: gaussian}`, "
        "or `peft={target_parameters: [mlp.experts.down_proj]}` for the experts of a mixture. With adapter: "
        "peft, any other method by its name: `adapter=peft peft={peft_type: VERA, r: 256}`. peft's own class "
        "says which fields there are.",
        costs="napkin has no price for it, unless it changes values alone. A simulation runs peft's code. It "
        "refuses FROD and SHiRA, which compute with the model's values: `harness run RECIPE --gpu h100` "
        "has an answer for them. PiSSA and OLoRA decompose every weight in setup, whose peak is another.",
    ),
}
"""By field: what it buys, and what it costs, of a field that has as many values as another library likes."""

SEVERAL_GPUS: dict[str, BuysAndCosts] = {
    "parallel": BuysAndCosts(
        buys="ddp: more rows at a time. fsdp: a model, its gradients and its optimizer's state divided "
        "by the number of GPUs. tp: layers, and what they keep for backward, divided as well.",
        costs="ddp: a second copy of the gradients, sent once a step. fsdp: every weight is gathered "
        "for forward and again for backward. tp: two sums over the ranks in each half of a block, "
        "which nothing hides.",
    ),
    "dp_replicate": BuysAndCosts(
        buys="Copies of the model that train together. With fsdp, parts need to be gathered within a "
        "group of dp_shard ranks only.",
        costs="Nothing is divided among copies.",
    ),
    "dp_shard": BuysAndCosts(
        buys="Weights, gradients and optimizer state divided by this many ranks.",
        costs="What is gathered, and the activations, stay as large as they are.",
    ),
    "tp": BuysAndCosts(
        buys="Large layers, and the activations inside them, divided by this many ranks.",
        costs="Activations between layers are whole on every rank; the ranks train on the same rows.",
    ),
    "reshard_after_forward": BuysAndCosts(
        buys="true: a unit's gathered weights are freed after its forward.",
        costs="They are gathered again in backward: half as much communication more. false keeps the "
        "whole model.",
    ),
    "reduce_dtype": BuysAndCosts(
        buys="fp32: gradients of 16-bit products are summed without rounding.",
        costs="Twice the bytes of 16 bit, in memory and on the links, while a unit's gradients are summed.",
    ),
    "sync_each_micro_batch": BuysAndCosts(
        buys="false: gradients are sent once a step and not after every micro batch.",
        costs="With fsdp every rank keeps the gradients of whole weights through the step.",
    ),
    "wrap": BuysAndCosts(
        buys="accelerate and transformers: the peak of a script that uses these libraries.",
        costs="They gather last norm and head as a unit of their own and keep it; block keeps the "
        "embedding too.",
    ),
    "cpu_offload": BuysAndCosts(
        buys="A rank's part of weights, gradients and optimizer state leaves the GPU.",
        costs="It travels over the host link for every unit, and the optimizer steps on the CPU.",
    ),
}
"""By field: what it buys, and what it costs. They have a page of their own, several-gpus.md, and no sweep."""

TOGGLES = [toggle for group in GROUPS.values() for toggle in group]
