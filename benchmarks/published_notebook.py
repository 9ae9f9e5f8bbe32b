"""The fsdp_qlora notebook's measurements, run again on shape-only tensors.

Source: AnswerDotAI/fsdp_qlora, nbs/00-profile_lora_qlora.ipynb: the model is made, moved to the GPU in bf16
(adapters too), run forward on one sequence with its key-value cache on, and backward from the mean of the
logits. Printed: memory_allocated after each. In the order of the notebook, as one process: what cuBLAS
allocated for an earlier model is still there for the next.
"""

from __future__ import annotations

from typing import Any

import torch

from harness.allocator_settings import Settings
from harness.cuda_rules import CudaRules, cuda_behaviour, import_bitsandbytes_fast
from harness.hardware import Hardware
from harness.module_paths import ModulePaths
from harness.recipe import Recipe
from harness.simulated_device import SimulatedDevice
from harness.simulated_memory import SimulatedMemory
from harness.simulated_time import SimulatedTime

META = torch.device("meta")
SIZES = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 4096,
}


def points(method: str, length: int, hardware: Hardware) -> dict[str, int]:
    """Bytes allocated after load, forward and (in training) backward, and the peak from load on."""
    import_bitsandbytes_fast()
    memory = SimulatedMemory(Settings(), None)
    rules = CudaRules(Recipe(model="none"), hardware)
    device = SimulatedDevice(memory, rules, SimulatedTime(hardware), ModulePaths())
    inference = method.endswith("-inference")
    with cuda_behaviour(rules):
        model = _model(method.removesuffix("-inference"))
        with device, torch.set_grad_enabled(not inference):
            _appear_on_device(model)
            found = {"allocated_after_load": memory.allocated_bytes}
            memory.reset_peak()
            output = model(torch.zeros(1, length, dtype=torch.int64, device="cpu").to(META))
            output.logits = output.logits.float()
            found["allocated_after_forward"] = memory.allocated_bytes
            if not inference:
                output.logits.mean().backward()
                found["allocated_after_backward"] = memory.allocated_bytes
            found["max_memory_allocated"] = memory.peak_bytes
    return found


def _model(method: str) -> Any:
    """The notebook's model, made where nothing counts."""
    import peft
    from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    with META:
        model: Any = LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16)
        model.train()
        if method.startswith("qlora"):
            how = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
            )
            replace_with_bnb_linear(model, ["lm_head"], how)
            for module in model.modules():
                if type(module).__name__ == "Linear4bit":
                    module.weight.data = module.weight.data.to(torch.bfloat16)
                    module.weight = module.weight._quantize(META)
            model.is_loaded_in_4bit = True
        if "lora" in method:
            config = peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, lora_dropout=0.1)
            model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
        if method.endswith("+gc"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _appear_on_device(model: Any) -> None:
    """Give every tensor of the model new memory on the device that counts."""
    from harness.tensors import model_tensors

    for tensor in {id(t): t for t in model_tensors(model)}.values():
        tensor.data = torch.empty_like(tensor)
