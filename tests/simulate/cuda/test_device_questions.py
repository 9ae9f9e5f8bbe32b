"""Every place where a library that runs in a step asks for the device: somebody has looked at each.

A shape-only tensor is on "meta", and code that asks may go another way than on a GPU (Liger did, with a
gigabyte more). What asks in a version that nobody has looked at fails here. Answers that differ have a rule
in harness/simulate/cuda/behaviour.py or cuda_libraries.py.
"""

import ast
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

LOOKED_AT = {
    "a rule gives CUDA's answer": """
        torch.utils._foreach_utils:_device_has_foreach_support
        torch.optim.optimizer:_default_to_fused_or_foreach
        torch.optim.optimizer:_device_dtype_check_for_fused
        transformers.integrations.moe:_can_use_grouped_mm
        transformers.utils.generic:maybe_autocast
        bitsandbytes.functional:is_on_gpu
        bitsandbytes.functional:_get_tensor_stream
        liger_kernel.ops.fused_linear_cross_entropy:_can_use_mm_out
        liger_kernel.ops.fused_linear_cross_entropy:fused_linear_cross_entropy_forward
    """,
    # it looks for a CPU, an XPU, a TPU, XLA or Apple's, or hands the device on
    "CUDA and meta go the same way": """
        torch.nn.functional:pad
        torch.utils.checkpoint:_infer_device_type.add_device_types
        torch.nn.utils.clip_grad:_get_total_norm
        torch.nn.utils.clip_grad:_clip_grads_with_norm_
        transformers.integrations.moe:grouped_mm_experts_forward
        transformers.models.gpt2.modeling_gpt2:GPT2Attention._upcast_and_reordered_attn
        peft.tuners.lora.layer:_LoraFactorsProxy.forward
        peft.utils.other:id_tensor_storage
        bitsandbytes.autograd._functions:matmul
        bitsandbytes.autograd._functions:matmul_4bit
        bitsandbytes.nn.modules:Linear4bit.forward
        bitsandbytes.optim.optimizer:Optimizer8bit.to_gpu
        bitsandbytes.optim.optimizer:Optimizer8bit.get_state_buffer
    """,
    "on CUDA only the host does more: it keeps a generator's state, or names the device": """
        torch.utils.checkpoint:get_device_states.add_device_ids
        torch.utils.checkpoint:set_device_states
        liger_kernel.ops.utils:device_context
    """,
    # AdamW's and Adafactor's are, unless fused
    "it asks of counters, which are in host memory everywhere": """
        torch.optim._adafactor:_multi_tensor_adafactor
        torch.optim.adam:_single_tensor_adam
        torch.optim.adam:_multi_tensor_adam
    """,
    "loading a quantized weight, layer by layer, has its own code (toggles/quantization.py)": """
        bitsandbytes.nn.modules:Params4bit.to
        bitsandbytes.nn.modules:Int8Params.to
    """,
    "no step of a recipe calls it": """
        torch.amp.grad_scaler:GradScaler.update
        torch.nn.functional:interpolate
        torch.nn.functional:max_pool3d_with_indices
        torch.nn.utils.clip_grad:clip_grad_value_
        torch.optim.optimizer:_disable_dynamo_if_unsupported.wrapper.maybe_fallback
        transformers.activations:XIELUActivation.forward
        peft.peft_model:get_layer_status
        peft.tuners.lora.layer:Embedding.get_delta_weight
        peft.tuners.lora.layer:Embedding.mica_init
        peft.tuners.lora.layer:Linear.get_delta_weight
        peft.tuners.lora.layer:LoraLayer.mica_init
        peft.tuners.lora.layer:MultiheadAttention.get_delta_weight
        peft.tuners.lora.layer:_ConvNd.get_delta_weight
        peft.tuners.lora.variants:BdLoraLinearVariant._get_bdlora_delta_weight
        peft.tuners.lora.variants:DoraLinearVariant.init
        peft.tuners.lora.variants:KasaLinearVariant._apply_deferred_truncation
        peft.tuners.lora.variants:KasaLinearVariant._get_delta_weight
        peft.tuners.lora.variants:KasaLinearVariant.init
        peft.tuners.lora.variants:MontecloraLinearVariant.init
    """,
}


def words(text: str) -> list[str]:
    return text.split()


FAMILIES = words("gemma gemma2 gpt2 gpt_neox llama mistral mixtral phi phi3 qwen2 qwen3")
MODULES = [f"transformers.models.{name}.modeling_{name}" for name in FAMILIES] + words(
    """
    torch.amp.grad_scaler torch.nn.functional torch.nn.utils.clip_grad torch.optim._adafactor torch.optim.adam
    torch.optim.adamw torch.optim.optimizer torch.optim.sgd torch.utils._foreach_utils torch.utils.checkpoint
    transformers.activations transformers.integrations.moe transformers.integrations.sdpa_attention
    transformers.loss.loss_utils transformers.masking_utils transformers.modeling_layers
    transformers.modeling_rope_utils transformers.utils.generic
    peft.peft_model peft.tuners.ia3.bnb peft.tuners.ia3.layer peft.tuners.lora.bnb peft.tuners.lora.layer
    peft.tuners.lora.model peft.tuners.lora.variants peft.tuners.tuners_utils peft.utils.other
    bitsandbytes.autograd._functions bitsandbytes.functional bitsandbytes.nn.modules
    bitsandbytes.nn.parametrize bitsandbytes.optim.adamw bitsandbytes.optim.lion bitsandbytes.optim.optimizer
    liger_kernel.ops.fused_linear_cross_entropy liger_kernel.ops.utils
    liger_kernel.transformers.functional liger_kernel.transformers.model.llama
    liger_kernel.transformers.model.loss_utils
    """
)
TESTED = {
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "peft": "0.21.2",
    "bitsandbytes": "0.50.2",
    "liger-kernel": "0.8.5",
}


class Questions(ast.NodeVisitor):
    """The functions of a module that ask for a tensor's device, by their names."""

    def __init__(self) -> None:
        self._path: list[str] = []
        self.found: set[str] = set()

    def _named(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._path.append(node.name)
        self.generic_visit(node)
        self._path.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _named

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """x.is_cuda, x.device.type, device.type, torch.cuda.get_device_capability."""
        whose = getattr(node.value, "attr", getattr(node.value, "id", None))
        if node.attr in ("is_cuda", "is_cpu", "is_meta", "get_device_capability") or (
            node.attr == "type" and whose == "device"
        ):
            self.found.add(".".join(self._path))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """device_type == "meta"."""
        if getattr(node.left, "id", None) == "device_type":
            self.found.add(".".join(self._path))
        self.generic_visit(node)


def questions() -> Iterator[str]:
    for name in MODULES:
        spec = find_spec(name)
        assert spec is not None, name
        assert spec.origin is not None, name
        asked = Questions()
        asked.visit(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
        yield from (f"{name}:{function}" for function in asked.found)


def test_somebody_has_looked_at_everything_that_asks_for_the_device() -> None:
    pytest.importorskip("liger_kernel")
    other = {name for name, tested in TESTED.items() if version(name).partition("+")[0] != tested}
    if other:
        pytest.skip(f"of {', '.join(sorted(other))} nobody has looked at this version")
    looked_at = [name for names in LOOKED_AT.values() for name in names.split()]
    assert len(looked_at) == len(set(looked_at))
    assert set(questions()) == set(looked_at)
