"""A rank's peak in hand-written FSDP2 and DDP loops: what holds the arithmetic of harness/napkin/memory.

    harness emulate --gpu h100 --world-size 8 -- python -m benchmarks.virtual_gpu.rank_loops 8.json

runs the cases of that many ranks, three steps each, and writes the peaks of the third by phase; cases that
are in the file are kept. Nothing here is the harness's: transformers' models, torch's engines, a loop as
people write it. The cases are in fields of a recipe, with `layers` as many as the model is cut to.
"""

import json
import os
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

MODELS = Path(__file__).parents[2] / "recipes" / "models"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, None: None}
STEPS = 3

MIXED = {"precision": "bf16-mixed", "reduce_dtype": "fp32"}
BF16 = {"precision": "bf16"}
LORA = {"precision": "bf16", "adapter": "lora", "lora_rank": 16, "adapter_dtype": "base"}
QLORA = LORA | {"quantization": "nf4"}
CHECKPOINTED = {"gradient_checkpointing": True}
UNSYNCED = {"sync_each_micro_batch": False}
LLAMA_3 = {"model": "llama-3.1-8b", "layers": 4, "seq_len": 2048, "micro_batch_size": 1}
LLAMA_2 = {"model": "llama-2-7b", "layers": 8, "seq_len": 1024, "micro_batch_size": 1}
TIED = {"model": "llama-3.2-1b", "layers": 6, "seq_len": 1024, "micro_batch_size": 2}
EIGHT = {"parallel": "fsdp", "dp_shard": 8}

CASES: list[dict[str, Any]] = [
    {**LLAMA_3, **EIGHT, **MIXED},
    {**LLAMA_3, **EIGHT, **MIXED, **CHECKPOINTED},
    {**LLAMA_3, **EIGHT, **BF16},
    {**LLAMA_3, **EIGHT, **BF16, "reduce_dtype": "fp32"},
    {**LLAMA_3, **EIGHT, **MIXED, "gradient_accumulation_steps": 2},
    {**LLAMA_3, **EIGHT, **MIXED, "gradient_accumulation_steps": 2, **UNSYNCED},
    {**LLAMA_3, **EIGHT, **BF16, "gradient_accumulation_steps": 2, **UNSYNCED},
    {**LLAMA_3, **EIGHT, **MIXED, "reshard_after_forward": False},
    {**LLAMA_3, **EIGHT, **LORA, **CHECKPOINTED},
    {**LLAMA_3, **EIGHT, **MIXED, "wrap": "accelerate"},
    {**LLAMA_3, **EIGHT, **MIXED, "micro_batch_size": 4, "seq_len": 4096},
    {**LLAMA_2, **EIGHT, **MIXED},
    {**LLAMA_2, **EIGHT, **MIXED, **CHECKPOINTED},
    {**LLAMA_2, **EIGHT, **MIXED, **CHECKPOINTED, "gradient_accumulation_steps": 3, **UNSYNCED},
    {**LLAMA_2, **EIGHT, **MIXED, **CHECKPOINTED, "wrap": "accelerate"},
    {**LLAMA_2, **EIGHT, **MIXED, **CHECKPOINTED, "reshard_after_forward": False},
    {**LLAMA_2, **MIXED, **CHECKPOINTED, "parallel": "fsdp", "dp_shard": 4, "dp_replicate": 2},
    {
        **LLAMA_2,
        **BF16,
        **CHECKPOINTED,
        "reduce_dtype": "fp32",
        "parallel": "fsdp",
        "dp_shard": 4,
        "dp_replicate": 2,
    },
    {**LLAMA_2, **EIGHT, **LORA},
    {**LLAMA_2, **EIGHT, **LORA, **CHECKPOINTED, "wrap": "accelerate"},
    {**LLAMA_2, **EIGHT, **QLORA, **CHECKPOINTED},
    {**LLAMA_2, **EIGHT, **QLORA},
    {**LLAMA_2, **EIGHT, **MIXED, **CHECKPOINTED, "cpu_offload": True, "max_grad_norm": None},
    {**TIED, **EIGHT, **MIXED},
    {**TIED, **EIGHT, **MIXED, **CHECKPOINTED, "wrap": "accelerate"},
    {**TIED, **EIGHT, "precision": "fp32"},
    {**LLAMA_3, **BF16, "parallel": "ddp", "dp_replicate": 8},
    {**LLAMA_3, **BF16, "parallel": "ddp", "dp_replicate": 8, "gradient_accumulation_steps": 2, **UNSYNCED},
    {**LLAMA_2, **LORA, **CHECKPOINTED, "parallel": "ddp", "dp_replicate": 8},
    {**LLAMA_2, **MIXED, **CHECKPOINTED, "parallel": "fsdp", "dp_shard": 2},
    {**LLAMA_2, **MIXED, "parallel": "fsdp", "dp_shard": 2, "wrap": "accelerate"},
    {**LLAMA_2, **LORA, "parallel": "fsdp", "dp_shard": 2},
    {**LLAMA_2, **QLORA, **CHECKPOINTED, "parallel": "fsdp", "dp_shard": 2},
    {**LLAMA_3, **MIXED, **CHECKPOINTED, "parallel": "fsdp", "dp_shard": 64},
    {**LLAMA_3, **MIXED, "parallel": "fsdp", "dp_shard": 64, "gradient_accumulation_steps": 2, **UNSYNCED},
    {**LLAMA_3, **BF16, **CHECKPOINTED, "parallel": "fsdp", "dp_shard": 64, "wrap": "accelerate"},
]


def ranks_of(case: dict[str, Any]) -> int:
    return case.get("dp_replicate", 1) * case.get("dp_shard", 1)


def built(case: dict[str, Any]) -> nn.Module:
    """The model on the device, or for FSDP2 without memory yet."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**json.loads((MODELS / f"{case['model']}.json").read_text()))
    config.num_hidden_layers = case["layers"]
    quantized = "quantization" in case
    dtype = torch.bfloat16 if case["precision"] == "bf16" else torch.float32
    with torch.device("cuda" if quantized or case["parallel"] == "ddp" else "meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if quantized:
        quantize(model)
    if case.get("adapter") == "lora":
        from peft import LoraConfig, get_peft_model

        wanted = LoraConfig(r=case["lora_rank"], lora_alpha=16, lora_dropout=0.0, target_modules="all-linear")
        model = get_peft_model(model, wanted, autocast_adapter_dtype=False)
        if quantized:  # peft makes them fp32
            for name, weight in model.named_parameters():
                if "lora_" in name:
                    weight.data = weight.data.to(torch.bfloat16)
    if case.get("gradient_checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if case.get("adapter"):
            model.enable_input_require_grads()
    return model.train()


def quantize(model: Any) -> None:
    """The linear layers of the blocks in nf4, packed in a dtype that FSDP2 divides."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    make: Any = Params4bit
    for block in model.model.layers:
        for parent in list(block.modules()):
            for name, layer in list(parent.named_children()):
                if type(layer) is nn.Linear:
                    new = Linear4bit(
                        layer.in_features,
                        layer.out_features,
                        bias=False,
                        compute_dtype=torch.bfloat16,
                        compress_statistics=False,
                        quant_type="nf4",
                        quant_storage=torch.bfloat16,
                        device="meta",
                    )
                    new.weight = make(
                        layer.weight.data.cpu(),
                        requires_grad=False,
                        compress_statistics=False,
                        quant_type="nf4",
                        quant_storage=torch.bfloat16,
                        module=new,
                    )
                    setattr(parent, name, new.to("cuda"))


def divided(case: dict[str, Any], model: Any) -> nn.Module:
    if case["parallel"] == "ddp":
        return DistributedDataParallel(model, broadcast_buffers=False)
    mesh = None
    if case.get("dp_replicate", 1) > 1:
        mesh = init_device_mesh("cuda", (case["dp_replicate"], case["dp_shard"]), mesh_dim_names=("r", "s"))
    mixed = torch.bfloat16 if case["precision"] == "bf16-mixed" else None
    how: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=mixed, reduce_dtype=DTYPES[case.get("reduce_dtype")]),
        "offload_policy": CPUOffloadPolicy() if case.get("cpu_offload") else OffloadPolicy(),
    }
    own = model.get_base_model() if case.get("adapter") else model
    keep = {"reshard_after_forward": case.get("reshard_after_forward", True)}
    for block in own.model.layers:
        fully_shard(block, **how, **keep)
    if case.get("wrap") == "accelerate":  # its fsdp2_prepare_model; under an adapter it finds no norm
        tied = own.config.tie_word_embeddings
        norm = [] if case.get("adapter") else [own.model.norm]
        if not tied:
            fully_shard(own.model.embed_tokens, **how, **keep)
        tail = [*norm, *([own.model.embed_tokens] if tied else []), own.lm_head]
        fully_shard(tail, **how, reshard_after_forward=False)
    fully_shard(model, **how)
    if "quantization" not in case:
        model.to_empty(device="cpu" if case.get("cpu_offload") else "cuda")
    if case.get("cpu_offload"):
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to("cuda"))
    return model


def peaks(case: dict[str, Any]) -> dict[str, int]:
    """Bytes allocated at the peak of each phase of the last of three steps."""
    model: Any = divided(case, built(case))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=True)
    micro_batches = case.get("gradient_accumulation_steps", 1)
    found: dict[str, int] = {}

    def ended(phase: str) -> None:
        found[phase] = max(found.get(phase, 0), torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    for _ in range(STEPS):
        found.clear()
        shape = case["micro_batch_size"], case["seq_len"]
        ids = [torch.zeros(shape, dtype=torch.long, device="cuda") for _ in range(2 * micro_batches)]
        torch.cuda.reset_peak_memory_stats()
        for index in range(micro_batches):
            last = index == micro_batches - 1 or case.get("sync_each_micro_batch", True)
            if case["parallel"] == "ddp":
                model.require_backward_grad_sync = last
            else:
                model.set_requires_gradient_sync(last)
            loss = model(input_ids=ids[2 * index], labels=ids[2 * index + 1], use_cache=False).loss
            ended("forward")
            loss.backward()
            del loss
            ended("backward")
        if case.get("max_grad_norm", 1.0) is not None:
            nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        ended("optimizer_step")
        optimizer.zero_grad(set_to_none=True)
    return found


def alone(case: dict[str, Any]) -> dict[str, int]:
    """The peaks of a case, in a process that has had no other."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    first = nn.Linear(8, 8, device="cuda")  # cuBLAS's workspaces are there before the model
    first(torch.zeros(8, 8, device="cuda", requires_grad=True)).sum().backward()
    del first
    return peaks(case)


def main(out: Path) -> None:
    import transformers.models.llama.modeling_llama  # noqa: F401  (once, for all forked processes)

    known = json.loads(out.read_text()) if out.exists() else []
    rows = []
    for case in CASES:
        if ranks_of(case) == int(os.environ["WORLD_SIZE"]):
            found = next((row for row in known if row["case"] == case), None)
            if found is None:
                # DDP compares models by values, which a virtual GPU does not keep in a fork
                start = "spawn" if case["parallel"] == "ddp" else "fork"
                with get_context(start).Pool(1) as process:
                    found = {"case": case, "peaks": process.apply(alone, (case,))}
                print(json.dumps(found), flush=True)
            rows.append(found)
    out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
