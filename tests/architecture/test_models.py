"""Every config in recipes/models builds the model it is named after, with its published parameter count."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from harness.architecture import load_shape, num_parameters
from harness.recipe.file import find_model_config, list_models

KERAS = "keras-hub, keras_hub/src/models/*/*_presets.py, metadata.params of "
HUB = "Hugging Face model API, safetensors.total of "
LORAM = "arXiv 2502.13533, #Orig. Params in "

# A tied head is the embedding and counts once. Mixture of experts: all experts count.
PUBLISHED = {
    # Not in a paper to more than two digits. By hand: embedding and head 2 * 32,000 * 8,192 = 524,288,000;
    # a block: q and o 2 * 8,192^2, k and v 2 * 1,024 * 8,192, MLP 3 * 8,192 * 22,016, norms 2 * 8,192
    # = 692,076,544; 48 blocks and the last norm: 524,288,000 + 33,219,674,112 + 8,192.
    "codellama-34b": (33_743_970_304, "Together's model list, num_parameters of Phind-CodeLlama-34B-v2"),
    "gemma-2-2b": (2_614_341_888, KERAS + "gemma2_2b_en"),
    "gemma-2-9b": (9_241_705_984, KERAS + "gemma2_9b_en"),
    "gpt2-large": (774_030_080, KERAS + "gpt2_large_en"),
    "gpt2-medium": (354_823_168, KERAS + "gpt2_medium_en"),
    "gpt2-small": (124_439_808, KERAS + "gpt2_base_en"),
    "llama-2-13b": (13_015_864_320, LORAM + "table 4"),
    "llama-2-70b": (68_976_648_192, LORAM + "table 5"),
    "llama-2-7b": (6_738_415_616, KERAS + "llama2_7b_en"),
    # The paper gives 405B. By hand from its sizes (arXiv 2407.21783, table 3): embedding and head
    # 2 * 128,256 * 16,384; a block: q and o 2 * 16,384^2, k and v 2 * 1,024 * 16,384, MLP
    # 3 * 16,384 * 53,248, norms 2 * 16,384; 126 blocks and the last norm.
    "llama-3.1-405b": (405_853_388_800, "by hand, from arXiv 2407.21783, table 3"),
    "llama-3.1-70b": (70_553_706_496, LORAM + "table 5"),
    "llama-3.1-8b": (8_030_261_248, KERAS + "llama3_8b_en (3 and 3.1 have the same sizes)"),
    "llama-3.2-1b": (1_235_814_400, HUB + "meta-llama/Llama-3.2-1B-Instruct"),
    "llama-3.2-3b": (3_212_749_824, HUB + "meta-llama/Llama-3.2-3B-Instruct"),
    "mistral-7b": (7_241_732_096, KERAS + "mistral_7b_en"),
    "mixtral-8x7b": (46_702_792_704, KERAS + "mixtral_8_7b_en"),
    "phi-3-mini": (3_821_079_552, KERAS + "phi3_mini_4k_instruct_en"),
    "pythia-1.4b": (1_414_647_808, "EleutherAI/pythia README, total parameters"),
    "qwen2.5-0.5b": (494_032_768, KERAS + "qwen2.5_0.5b_en"),
    "qwen2.5-7b": (7_615_616_512, KERAS + "qwen2.5_math_7b_en (the same sizes as qwen2.5-7b)"),
    "qwen3-8b": (8_190_735_360, KERAS + "qwen3_8b_en"),
    "gemma-3-12b": (11_766_034_176, KERAS + "gemma3_12b_text, and 64 words of 3,840 that Keras leaves out"),
    "gemma-3-1b": (999_885_952, KERAS + "gemma3_1b"),
    "gemma-3-27b": (27_009_346_304, KERAS + "gemma3_27b_text, and 64 words of 5,376 that Keras leaves out"),
    "gemma-3-4b": (3_880_263_168, KERAS + "gemma3_4b_text, and 64 words of 2,560 that Keras leaves out"),
    "gpt-oss-120b": (116_829_156_672, "arXiv 2508.10925, table 1: 116.83 billion"),
    "gpt-oss-20b": (20_914_757_184, "arXiv 2508.10925, table 1: 20.91 billion"),
    "qwen2.5-1.5b": (1_543_714_304, KERAS + "qwen2.5_math_1.5b_en (the same sizes as qwen2.5-1.5b)"),
    "qwen2.5-32b": (32_763_876_352, KERAS + "qwen2.5_instruct_32b_en"),
    "qwen2.5-3b": (3_085_938_688, KERAS + "qwen2.5_3b_en"),
    "qwen2.5-72b": (72_706_203_648, KERAS + "qwen2.5_instruct_72b_en"),
    "gemma-3-4b-vision": (4_300_079_472, HUB + "google/gemma-3-4b-it"),
    "qwen2.5-vl-7b": (8_292_166_656, HUB + "Qwen/Qwen2.5-VL-7B-Instruct"),
    "qwen3-0.6b": (596_049_920, KERAS + "qwen3_0.6b_en"),
    "qwen3-1.7b": (1_720_574_976, KERAS + "qwen3_1.7b_en"),
    "qwen3-14b": (14_768_307_200, KERAS + "qwen3_14b_en"),
    "qwen3-235b-a22b": (235_093_634_560, KERAS + "qwen3_moe_235b_a22b_en"),
    "qwen3-30b-a3b": (30_532_122_624, KERAS + "qwen3_moe_30b_a3b_en"),
    "qwen3-32b": (32_762_123_264, KERAS + "qwen3_32b_en"),
    "qwen3-4b": (4_022_468_096, KERAS + "qwen3_4b_en"),
    # without the layers that predict further tokens, which transformers does not build: Qwen3-Next has
    # 81,324,862,720 with them, and Qwen3-Coder-Next is the same model published without
    "qwen3-next-80b-a3b": (79_674_391_296, HUB + "Qwen/Qwen3-Coder-Next"),
    "qwen3-vl-8b": (8_767_123_696, HUB + "Qwen/Qwen3-VL-8B-Instruct"),
    "qwen3.5-35b-a3b": (35_107_181_936, KERAS + "qwen3_5_moe_35b_a3b"),
    "qwen3.5-9b": (9_409_813_744, KERAS + "qwen3_5_9b"),
    "qwen2.5-14b": (14_770_033_664, "llama.cpp, n_params of Qwen2.5-14B-Instruct"),
    "gemma-4-31b": (31_273_086_512, HUB + "google/gemma-4-31B-it"),
    # PrimeIntellect's INTELLECT-3, trained from it, is published without further tokens' layers:
    # 106,852,251,264, of which 45 x 128 are the experts' corrections, buffers here
    "glm-4.5-air": (106_852_245_504, HUB + "PrimeIntellect/INTELLECT-3, less 5,760 buffers"),
    "granite-4.0-h-tiny": (6_939_037_248, HUB + "ibm-granite/granite-4.0-h-tiny-base"),
    "lfm2-1.2b": (1_170_340_608, HUB + "LiquidAI/LFM2-1.2B"),
    "llama-4-scout": (108_641_793_536, HUB + "meta-llama/Llama-4-Scout-17B-16E-Instruct"),
    "mistral-small-24b": (23_572_403_200, KERAS + "magistral_small_2506_en (the same sizes)"),
    "nemotron-3-nano-30b": (31_577_937_344, HUB + "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    "olmo-3-7b": (7_298_011_136, "a training log of allenai/Olmo-3-1025-7B, num_params"),
    "phi-4": (14_659_507_200, HUB + "microsoft/phi-4"),
    "smollm3-3b": (3_075_098_624, HUB + "HuggingFaceTB/SmolLM3-3B"),
    # Ours. By hand: embedding and head 2 * 264 * 128 = 67,584; a block: q and o 2 * 128 * 128, k and v
    # 2 * 64 * 128, MLP 3 * 128 * 384, norms 2 * 128 = 196,864; 4 blocks and the last norm 787,584.
    "tiny-llama-bytes": (855_168, "by hand"),
    "tinyllama-1.1b": (1_100_048_384, HUB + "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"),
}


def test_there_are_exactly_the_published_models() -> None:
    assert list_models() == sorted(PUBLISHED)
    assert len(PUBLISHED) == 57


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name: str) -> None:
    path = find_model_config(name)
    assert path is not None
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        model = kind.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name][0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_key_means_something_to_transformers(name: str) -> None:
    """A misspelt key would be kept as a stray attribute, and the default used."""
    path = find_model_config(name)
    assert path is not None
    values = json.loads(path.read_text())
    config = AutoConfig.from_pretrained(path)
    known = set(type(config)().to_dict()) | {"_name_or_path"}
    # older spellings that the config classes take and convert, and Gemma-2's published duplicate
    converted = {"rope_theta", "rope_scaling", "rope_local_base_freq", "rotary_pct", "rotary_emb_base"}
    if config.model_type == "gemma2":
        converted.add("hidden_act")
    if config.model_type in ("qwen3_next", "glm4_moe"):
        converted |= {"partial_rotary_factor", "full_attention_interval", "head_dim", "num_experts"}
    if config.model_type == "lfm2":
        converted |= {"block_ff_dim", "tie_embedding"}
    if config.model_type == "nemotron_h":
        converted.add("hybrid_override_pattern")
    if config.model_type == "qwen3_moe":  # as published: one is read where it is there, one has two names
        converted |= {"head_dim", "num_experts"}
    assert set(values) - known - converted == set()


ALMOST = {"gpt-oss-20b": 0.001, "gpt-oss-120b": 0.001, "llama-4-scout": 0.001, "gemma-4-31b": 0.022}
"""What arithmetic leaves out, as a share: gpt-oss has biases of experts and of the router, Llama 4's tower an
adapter of its own, and each sixth layer of Gemma 4 has other heads and no values of their own."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_counted_without_the_model(name: str) -> None:
    """From the config alone."""
    published = PUBLISHED[name][0]
    assert 0 <= published - num_parameters(load_shape(name)) <= ALMOST.get(name, 0) * published


def test_rope_of_llama_3_survives_the_conversion() -> None:
    config = AutoConfig.from_pretrained(_path("llama-3.2-1b"))
    assert config.rope_parameters["rope_type"] == "llama3"
    assert (config.rope_parameters["rope_theta"], config.rope_parameters["factor"]) == (500_000, 32)


def test_pythia_rotates_a_quarter_of_each_head() -> None:
    config = AutoConfig.from_pretrained(_path("pythia-1.4b"))
    assert config.rope_parameters["partial_rotary_factor"] == 0.25


def test_a_name_cannot_leave_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path / "outside.json"
    outside.write_text("{}")
    assert find_model_config(str(outside.with_suffix(""))) is None
    assert find_model_config("../models/gpt2-small") is None
    assert find_model_config("no-such-model") is None


def _path(name: str) -> Path:
    path = find_model_config(name)
    assert path is not None
    return path
