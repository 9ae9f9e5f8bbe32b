"""What loading a checkpoint takes on a virtual GPU, alone and on two, is what the simulation
says; and so is what is allocated and reserved from then on, in as many steps.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.hardware.hardware import find_hardware
from harness.recipe.recipe import Recipe
from harness.simulate.simulated_run import simulate
from tests.support.commands import run_harness
from tests.support.places import ROOT

pytestmark = pytest.mark.virtual_gpu

LORA = {"adapter": "lora", "adapter_dtype": "base"}
DIVIDED: dict[str, dict[str, Any]] = {
    "alone": {},
    "alone qlora": {"quantization": "nf4", "double_quant": True} | LORA,
    "fsdp": {"parallel": "fsdp", "dp_shard": 2},
    "fsdp qlora": {"parallel": "fsdp", "dp_shard": 2, "quantization": "nf4", "double_quant": True} | LORA,
    "tp": {"parallel": "tp", "tp": 2},
    "tp that loses sums": {"parallel": "tp", "tp": 2, "gradient_checkpointing": True} | LORA,
}
ROUNDED_BYTES = 4 * 512
"""The simulation makes rotary frequencies on the GPU, where transformers brings them from the host."""
SIZES: dict[str, Any] = {
    "weights": "pretrained",
    "precision": "bf16",
    "micro_batch_size": 1,
    "seq_len": 64,
    "warmup_steps": 1,
    "steps": 1,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama-3.2-1B with two layers: 0.8 GB, of which one matrix takes 32 MiB."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("checkpoint")
    fields = json.loads((ROOT / "recipes" / "models" / "llama-3.2-1b.json").read_text())
    config = AutoConfig.for_model(**fields | {"num_hidden_layers": 2, "vocab_size": 8192})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("fields", DIVIDED.values(), ids=DIVIDED)
def test_a_checkpoint_is_loaded_layer_by_layer(
    fields: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    recipe = {"model": str(checkpoint), **SIZES, **fields}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    command = ["run", "recipe.yaml", "--gpu", "h200", "--out", "run"]
    command += ["--gpus", "2"] if "parallel" in fields else []
    run_harness(*command, cwd=tmp_path, PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1")
    of_rank = "ranks/0" if "parallel" in fields else "."
    emulated = json.loads((tmp_path / "run" / of_rank / "profile.json").read_text())["memory"]
    simulated = simulate(Recipe(**recipe), find_hardware("h200"))[0].memory
    for what in ("peak_allocated_bytes", "peak_reserved_bytes"):
        assert getattr(simulated, what) == emulated[what], what
    apart = (simulated.setup_peak_allocated_bytes or 0) - emulated["setup_peak_allocated_bytes"]
    assert 0 <= apart <= ROUNDED_BYTES
