"""What really happens: tiny models of several families, and the tensors that autograd saves for them.

The recipes run on the CPU, with the project's own model and step; the counting is PyTorch's.
"""

import json
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from harness.hardware.hardware import find_hardware
from harness.napkin import Memory, estimate
from harness.recipe.recipe import Recipe
from harness.training.model import build_training

LAYERS = 3
_SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SMALL,
    "llama without grouped heads": _SMALL | {"model_type": "llama", "num_key_value_heads": 4},
    "llama tied": _SMALL | {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": _SMALL,
    "qwen2": _SMALL,
    "qwen3": _SMALL | {"head_dim": 16},
    "gemma": _SMALL | {"head_dim": 16},
    "gemma2": _SMALL | {"head_dim": 16},
    "phi3": _SMALL,
    "phi": _SMALL | {"num_key_value_heads": 4},
    "gpt_neox": _SMALL,
    "gpt2": {
        "vocab_size": 320,
        "n_embd": 64,
        "n_layer": LAYERS,
        "n_head": 4,
        "n_positions": 64,
        # without dropout: the CPU's keeps a mask in the tensor's dtype, CUDA's one byte an element
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "loss_type": "ForCausalLM",
    },
    "mixtral": _SMALL | {"num_local_experts": 4},
}


def recipe_for(folder: Any, family: str, **fields: Any) -> Recipe:
    """A recipe for a tiny model of `family`; `config` changes the model, the other fields the recipe."""
    config = {"model_type": family, **CONFIGS[family], **fields.pop("config", {})}
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return Recipe(**{"model": str(path), "micro_batch_size": 2, "seq_len": 24, "precision": "bf16", **fields})


def napkin(recipe: Recipe) -> Memory:
    return estimate(recipe, find_hardware("a100-80gb"))


def saved_bytes(recipe: Recipe) -> int:
    """Bytes of the distinct storages autograd saves in one forward pass, weights and inputs apart.

    Apart from one: transformers before 5.23 keeps in every mixture a mask of the pairs whose expert is on
    another GPU, though there is none.

    With `compile`, what the graph that torch.compile makes of the model keeps: its passes and its partitioner
    decide, and no kernel is generated.
    """
    training = build_training(
        recipe.model_copy(update={"compile": False, "activation_memory_budget": 1.0}), torch.device("cpu")
    )
    model = training.model
    batch = _batch(recipe)
    count = torch.tensor(float(recipe.tokens_per_step))
    known = [*model.parameters(), *model.buffers(), *batch.values(), count]
    apart = {t.untyped_storage()._cdata for t in known}
    saved: dict[int, int] = {}
    alive = []  # a storage that died could give its address to another

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        callers = {frame.name for frame in traceback.extract_stack()} if tensor.dtype == torch.bool else ()
        of_other_gpus = "grouped_mm_experts_forward" in callers
        if storage._cdata not in apart and not of_other_gpus and not isinstance(tensor, nn.Parameter):
            saved[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    if recipe.compile:
        torch._dynamo.reset()  # or the sizes of an earlier model make this one's symbols
        model = torch.compile(model, backend=_partitioned)
        budget = torch._functorch.config.patch(activation_memory_budget=recipe.activation_memory_budget)
        with training.autocast(), budget:
            model(**batch, num_items_in_batch=count)  # traced here, without the hooks
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), training.autocast():
        loss = model(**batch, num_items_in_batch=count).loss
    assert torch.isfinite(loss)
    return sum(saved.values())


def _partitioned(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """torch.compile's own backend up to where it would generate kernels: the graphs run as they are."""
    from torch._inductor.compile_fx import compile_fx  # more than a second, which few tests need

    return compile_fx(graph, inputs, inner_compile=_interpreted)


def _interpreted(graph: torch.fx.GraphModule, _: Any, **__: Any) -> Callable[..., Any]:
    return torch.fx.Interpreter(graph).run


def _batch(recipe: Recipe) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 300, (recipe.micro_batch_size, recipe.seq_len))
    return {"input_ids": ids, "labels": ids.clone()}
