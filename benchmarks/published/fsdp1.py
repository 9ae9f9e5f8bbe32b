"""The rows of AnswerDotAI/fsdp_qlora as its train.py made them: PyTorch's FSDP1 and libraries of that day.

    python -m benchmarks.published.fsdp1 SOURCES [ROW ...]

writes profiles/published/fsdp1.json. It needs PyTorch's CUDA build and no GPU: rank 0 of a row runs alone on
a virtual GPU, three times: with a device that is fast without an end, with one that takes what is estimated
(`--by-clock`), and with one as slow as can be (`--late`).
SOURCES is a folder with transformers and peft of the day, as FETCH below makes it; PyTorch, bitsandbytes and
the kernels are today's, but for bitsandbytes' 4-bit product. What train.py does (commit 05ed9f2, functions
`fsdp_main` and `load_and_quantize`) is stated here, in its order. Rows that are there already, of the same
versions, are not made again.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed, nn

from benchmarks.published.cases import FOLDER
from benchmarks.published.device import AS_THEN
from harness.system.files import write_whole
from harness.system.versions import provenance
from harness.virtual_gpu import OVER, Options, emulated_device, surroundings

RESULTS = FOLDER / "fsdp1.json"
DAY = "transformers-4.37.2"
"""The release before those that the source's README excludes."""
FETCH = f"""\
pip install --no-deps --target SOURCES/{DAY} transformers==4.37.2 peft==0.9.0 accelerate==0.27.2 \\
    tokenizers==0.15.2 huggingface_hub==0.20.3 requests urllib3 idna charset_normalizer certifi"""
GPU, RANKS = "rtx-3090", 2
"""Of all rows: the other machine's cards, RTX 4090, are of the same size."""
STEPS = 4


def main() -> None:
    """See the module's docstring."""
    sources, names = Path(sys.argv[1]), sys.argv[2:]
    if emulated_device():
        print_here(names)
        return
    if not (sources / DAY).is_dir():
        sys.exit(f"{sources} lacks {DAY}. This command makes it:\n{FETCH}")
    made: dict[str, Any] = {"provenance": provenance(), "day": DAY, "rows": []}
    if RESULTS.exists():
        before = json.loads(RESULTS.read_bytes())
        if before["provenance"]["versions"].items() <= made["provenance"]["versions"].items():
            made["rows"] = before["rows"]
    order = list(_rows())
    wanted = [name for name in names or order if name not in {row["id"] for row in made["rows"]}]
    for row in _on_virtual_gpus(sources, wanted):
        print(row, flush=True)
        made["rows"].append(row)
        made["rows"].sort(key=lambda row: order.index(row["id"]))
        write_whole(RESULTS, json.dumps(made, indent=1) + "\n")


def _rows() -> dict[str, dict[str, Any]]:
    """By id, those of one recipe once: the source has the same peaks for both of its machines."""
    rows = json.loads((FOLDER / "distributed.json").read_bytes())["rows"]
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["id"].startswith("fsdp_qlora/") and "error" in row:
            found.setdefault(json.dumps(row["made_of"]), row)
    return {row["id"]: row for row in found.values()}


def _on_virtual_gpus(sources: Path, names: list[str]) -> Iterator[dict[str, Any]]:
    environment = surroundings(Options(GPU, gpus=RANKS, world_size=RANKS), os.environ) | AS_THEN
    paths = [environment["PYTHONPATH"], str(sources / DAY), os.getcwd()]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-m", "benchmarks.published.fsdp1", str(sources), *names]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
        for line in run.stdout or ():
            yield json.loads(line)
    if run.returncode:
        sys.exit(run.returncode)


def print_here(names: list[str]) -> None:
    """In a process on virtual GPUs: a line of JSON for each row. Memory that FSDP1 shares between streams is
    free again at once, when the clock says so, or when the host has waited."""
    import peft  # noqa: F401  (once, for all that are forked)

    for name in names:
        found: dict[str, Any] = {"id": name}
        for when in ("at_once", "by_clock", "late"):
            os.environ["VIRTUAL_GPU_OVER"] = OVER[when]
            with get_context("fork").Pool(1) as process:
                try:
                    found[when] = process.apply(peaks, (_rows()[name],))
                except torch.OutOfMemoryError as error:
                    found[when] = {"ran_out": str(error).partition(" GPU 0 has")[0]}
        print(json.dumps(found), flush=True)


def peaks(row: dict[str, Any]) -> dict[str, int]:
    """PyTorch's counters after STEPS steps, reset before the first as the source does it."""
    from benchmarks.published.litgpt import MatMul4Bit

    recipe = row["made_of"]["recipe"]
    torch.cuda.set_device(0)
    distributed.init_process_group("nccl")
    with (
        patch("bitsandbytes.autograd._functions.MatMul4Bit", MatMul4Bit),
        patch.object(torch.Tensor, "pin_memory", _pinned),
        patch("torch.zeros_like", partial(_zeros_like, torch.zeros_like)),
    ):
        model = _divided(_with_adapter(_loaded(recipe), recipe), recipe, row["method"])
        torch.cuda.reset_peak_memory_stats()
        _train(model, recipe)
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }


def _pinned(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    """Without its contents: pages that nobody writes take no memory of this machine."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def _zeros_like(real: Any, tensor: torch.Tensor, **keywords: Any) -> torch.Tensor:
    on_host = keywords.get("device") == torch.device("cpu")
    return torch.empty_like(tensor, **keywords) if on_host else real(tensor, **keywords)


def _loaded(recipe: dict[str, Any]) -> nn.Module:
    """The model in host memory, 4-bit layers quantized on the GPU on their way; their scales stay there."""
    from accelerate.big_modeling import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    from harness.architecture.model_id import find_config

    config = AutoConfig.from_pretrained(find_config(recipe["model"]))
    config.use_cache, config._attn_implementation = False, "sdpa"
    quantized = recipe.get("quantization") == "nf4"
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, torch_dtype=None if quantized else torch.bfloat16)
        if quantized:
            _replace_linear(model.model)
    if not quantized:
        model.to(torch.bfloat16)
    for path, parameter in list(model.named_parameters()):
        name, _, last = path.rpartition(".")
        module = model.get_submodule(name)
        value = torch.empty(parameter.shape, dtype=torch.bfloat16, device="cpu")
        if hasattr(parameter, "quant_state"):
            value = type(parameter)(value.to("cuda"), **parameter.__dict__).cuda()
            value = type(parameter)(torch.empty_like(value.data, device="cpu"), **value.__dict__)
        else:
            value = nn.Parameter(value)
        setattr(module, last, value)
    torch.cuda.empty_cache()
    model.is_loaded_in_4bit = quantized
    return model


def _replace_linear(model: nn.Module) -> None:
    from bitsandbytes.nn import Linear4bit

    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            name, _, last = path.rpartition(".")
            made = Linear4bit(
                layer.in_features,
                layer.out_features,
                layer.bias is not None,
                compute_dtype=torch.bfloat16,
                quant_type="nf4",
                quant_storage=torch.bfloat16,
            )
            setattr(model.get_submodule(name), last, made)


def _with_adapter(model: nn.Module, recipe: dict[str, Any]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe["lora_rank"],
        lora_alpha=recipe["lora_alpha"],
        lora_dropout=recipe["lora_dropout"],
        target_modules=list(recipe["lora_targets"]),
    )
    return get_peft_model(model, config)


def _divided(model: nn.Module, recipe: dict[str, Any], method: str) -> nn.Module:
    """FSDP1 with a unit for each block and for each trained leaf, checkpointing as the source's command."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )
    from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    from transformers.models.mistral.modeling_mistral import MistralDecoderLayer

    blocks = (LlamaDecoderLayer, MistralDecoderLayer)

    def is_unit(module: nn.Module, recurse: bool, **_: Any) -> bool:
        leaf = not any(module.children()) and getattr(module, "weight", None) is not None
        return recurse or isinstance(module, blocks) or (leaf and next(module.parameters()).requires_grad)

    model = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy.NO_SHARD if "ddp" in method else ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=is_unit,
        use_orig_params=False,
        cpu_offload=CPUOffload(offload_params=True) if recipe.get("cpu_offload") else None,
        limit_all_gathers=True,
        device_id=torch.cuda.current_device(),
        sync_module_states=True,
    )
    model.enable_input_require_grads()  # reentrant_checkpointing, which the source's command asks for
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
        check_fn=lambda module: isinstance(module, blocks),
    )
    return model


def _train(model: nn.Module, recipe: dict[str, Any]) -> None:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-5, betas=(0.9, 0.95), eps=1e-5, weight_decay=recipe["weight_decay"]
    )
    model.train()
    sums = torch.zeros(2).cuda()
    batch = torch.zeros(recipe["micro_batch_size"], recipe["seq_len"], dtype=torch.int64)
    for _ in range(STEPS):
        output = model(batch.cuda(), labels=batch.cuda(), attention_mask=None)
        loss = output.loss
        loss.backward()
        sums[0] += loss.item() * len(batch)
        sums[1] += len(batch)
        optimizer.step()
        optimizer.zero_grad()
        output = loss = None
        distributed.all_reduce(sums)
        sums = torch.zeros(2).cuda()


if __name__ == "__main__":
    main()
