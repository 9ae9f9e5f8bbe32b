"""Simulations: every recipe and every model, the steady step, the first step, and running out of memory.

That the simulated step is the real one is shown in simulate/test_simulate_equals_cpu.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch.torch_version import TorchVersion
from torch.utils._device import _device_constructors

from harness.allocator.settings import parse_settings
from harness.errors import InputError
from harness.hardware.hardware import Hardware, find_hardware, with_memory
from harness.kernels import quantized
from harness.recipe import Recipe, list_models, list_recipes, load_recipe
from harness.simulate.simulated_run import simulate
from harness.step_profile import StepProfile, explain_oom
from harness.system import TorchRelease, recipes_folder
from tests.support.tiny import cut, tiny

MiB = 2**20
B200 = find_hardware("b200")
T4 = find_hardware("t4")
RECIPES = [name for name, _ in list_recipes()]


def but_for_numbers(model: str) -> str:
    """What its config says in words and switches: two models of one architecture differ in sizes alone."""
    config = json.loads((recipes_folder() / "models" / f"{model}.json").read_bytes())
    config.pop("_name_or_path", None)
    said = {name: value for name, value in config.items() if isinstance(value, str | bool | None)}
    heads = config.get("num_key_value_heads", 0) == config.get("num_attention_heads")
    return json.dumps([said, heads], sort_keys=True)


OTHER_MODELS = sorted(
    {
        but_for_numbers(model): model
        for model in sorted(set(list_models()) - {load_recipe(name)[1].model for name in RECIPES})
    }.values()
)


def simulated(recipe: Recipe, hardware: Hardware = B200, settings: str = "") -> StepProfile:
    return simulate(recipe, hardware, parse_settings(settings))[0]


def test_a_step_longer_than_any_memory_is_answered():
    """Its rows would take 2**31 numbers each; the answer takes their shapes."""
    profile = simulated(tiny(seq_len=2**31 - 1))
    assert profile.oom is not None
    assert profile.oom.requested_bytes is not None
    assert profile.oom.requested_bytes > B200.memory_bytes / 4
    with pytest.raises(InputError, match="a tensor of more than 2\\^63 bytes in forward"):
        simulated(tiny(seq_len=2**31 - 1, attention="eager"), with_memory(B200, 2**62))


FALLING = {
    "transformers 5.17": [
        (2, 12_445_492_224, 13_088_325_632),
        (3, 12_440_090_624, 13_188_988_928),
        (4, 12_437_220_352, 14_709_424_128),
    ],
    "torch 2.13": [
        (2, 12_444_247_040, 13_079_937_024),
        (3, 12_441_679_872, 13_222_543_360),
        (4, 12_437_629_952, 14_709_424_128),
    ],
    "torch 2.15": [
        (2, 12_387_558_400, 13_063_159_808),
        (3, 12_370_266_112, 12_996_050_944),
        (4, 12_379_610_112, 14_564_720_640),
    ],
}
"""Rows, and the bytes allocated and reserved at most that PyTorch's own allocator says in its CUDA build on a
virtual GPU (harness/virtual_gpu, h100): under 2.11 with transformers 5.17, whose rotary angles are a product;
under 2.11 and 2.13 with later ones; and under 2.15, which keeps no workspaces."""
KEEPS_WORKSPACES = TorchRelease.of(torch.__version__).keeps_cublas_workspaces
ANGLES_BY_PRODUCT = Version(transformers.__version__) < Version("5.19")
HERE = "torch 2.15" if not KEEPS_WORKSPACES else "transformers 5.17" if ANGLES_BY_PRODUCT else "torch 2.13"


@pytest.mark.parametrize(("micro_batch_size", "peak_allocated_bytes", "peak_reserved_bytes"), FALLING[HERE])
def test_the_peak_may_fall_when_the_batch_grows(
    micro_batch_size: int, peak_allocated_bytes: int, peak_reserved_bytes: int
) -> None:
    """A cached block with at most 1 MiB too much is handed out whole and counts as allocated whole, and which
    blocks are cached depends on the batch."""
    changes = [f"micro_batch_size={micro_batch_size}", "seq_len=333"]
    memory = simulated(load_recipe("llama-3.2-1b-bf16", changes)[1], find_hardware("h100")).memory
    assert memory.peak_allocated_bytes == peak_allocated_bytes
    assert memory.peak_reserved_bytes == peak_reserved_bytes
    assert memory.peak_phase == "optimizer_step"


def check(profile: StepProfile) -> None:
    """What holds for every complete simulation."""
    memory, step = profile.memory, profile.step
    assert profile.complete
    assert profile.oom is None
    # somebody has looked at every operator that ran; of a mixture, it is said how its experts are stored, and
    # of a recurrent layer, that its kernels' packages are not here
    known = "the experts (", "recurrent layers run as PyTorch's own operators"
    warned = [warning for warning in profile.warnings if not any(words in warning for words in known)]
    towers = ["aten::convolution (whose plan cuDNN chooses)"] if profile.recipe["images"] else []
    assert len(warned) == len(towers)
    assert all(what in line for what, line in zip(towers, warned, strict=True))
    assert set(profile.phases) == {"data", "forward", "backward", "optimizer_step"}
    peak, reserved = memory.peak_allocated_bytes, memory.peak_reserved_bytes
    assert peak is not None
    assert reserved is not None
    assert memory.at_peak.total_bytes() == peak
    assert peak == max(phase.peak_allocated_bytes or 0 for phase in profile.phases.values())
    assert peak <= reserved <= profile.hardware.memory_bytes  # type: ignore[operator]
    assert step.mfu is not None
    assert step.hfu is not None
    assert 0 < step.mfu <= step.hfu <= 1
    assert sum(phase.time_s.median or 0 for phase in profile.phases.values()) == step.time_s.median
    if profile.recipe["offload"]:
        assert memory.host_bytes
    elif memory.host_bytes:
        assert profile.recipe["optimizer"].startswith("paged")  # and it pages nothing below 100,000 elements


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_simulates(name: str, tmp_path: Path) -> None:
    check(simulated(cut(load_recipe(name)[1], tmp_path)))


@pytest.mark.parametrize("model", OTHER_MODELS)
def test_every_model_simulates(model: str, tmp_path: Path) -> None:
    # only eager caps Gemma-2's scores, and gpt-oss has no other
    attention = "eager" if model.startswith(("gemma", "gpt-oss")) else "sdpa"
    fields = {"model": model, "adapter": "lora", "seq_len": 512, "attention": attention}
    if model.startswith(("llama-4", "nemotron")):  # peft refuses a router's and a mamba layer's output
        fields["lora_targets"] = ["q_proj", "o_proj"]
    recipe = Recipe.model_validate(fields)
    check(simulated(cut(recipe, tmp_path)))


def test_nothing_is_left_out() -> None:
    assert len(RECIPES) >= 20
    assert len(OTHER_MODELS) >= 5


def test_the_optimizer_state_is_made_in_the_first_step() -> None:
    """Both steps peak in backward; the later one has the moments, and still holds the loss of the first."""
    memory = simulated(tiny(seq_len=512, micro_batch_size=4)).memory
    state = memory.at_peak.optimizer_state_bytes
    assert memory.peak_phase == "backward"
    assert state is not None
    assert state > 2 * 4 * 100_000  # two fp32 moments of a model of more than 100,000 weights
    assert memory.peak_allocated_bytes == (memory.first_step_peak_allocated_bytes or 0) + state + 512


@pytest.fixture
def torch_keeps_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.15 torch keeps cuBLAS' workspaces for the life of the process."""
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))


def test_two_runs_are_the_same() -> None:
    def document() -> dict[str, Any]:
        profile = json.loads(simulated(tiny(adapter="lora", lora_dropout=0.1)).to_json())
        for name in ("time", "git_commit", "git_dirty"):  # somebody may edit or commit between the two
            del profile["provenance"][name]
        return profile

    assert document() == document()


def test_offloaded_bytes_lie_on_the_host() -> None:
    plain, offloaded = simulated(tiny(), T4), simulated(tiny(offload=["optimizer"]), T4)
    assert plain.memory.host_bytes is None
    # two fp32 moments; for the step on the host the weights and their gradients; and foreach AdamW's
    # temporaries: 5 times as large
    weights = plain.memory.at_peak.parameters_bytes or 0
    assert offloaded.memory.host_bytes == pytest.approx(5 * weights, rel=0.02)
    assert not offloaded.memory.at_peak.optimizer_state_bytes


def with_mib(mib: int) -> Hardware:
    """A T4 that has so much memory beside the CUDA context."""
    return with_memory(T4, T4.calibration.cuda_context_bytes + mib * MiB)


@pytest.mark.usefixtures("torch_keeps_workspaces")
@pytest.mark.parametrize(
    ("mib", "phase"), [(1, "setup"), (2, "forward"), (22, "forward"), (28, "backward"), (30, None)]
)
def test_too_small_a_device_says_where_it_ends(mib: int, phase: str | None) -> None:
    profile = simulated(tiny(seq_len=64, micro_batch_size=8), with_mib(mib))
    oom = profile.oom
    if phase is None:
        check(profile)
        return
    assert oom is not None
    assert not profile.complete
    assert oom.phase == profile.memory.peak_phase == phase
    assert oom.requested_bytes is not None
    assert oom.free_bytes is not None
    at_peak = profile.memory.at_peak
    assert at_peak.total_bytes() == profile.memory.peak_allocated_bytes
    assert at_peak.total_bytes() + oom.free_bytes + (oom.reserved_unallocated_bytes or 0) == mib * MiB
    assert f"out of memory in {phase}, asking for" in explain_oom(profile)
    peaks = (profile.memory.setup_peak_allocated_bytes, profile.memory.first_step_peak_allocated_bytes)
    highest = max(peak or 0 for peak in peaks)
    assert 0.99 * highest <= at_peak.total_bytes() <= highest
    if phase != "setup":
        assert at_peak.parameters_bytes is not None
        assert at_peak.parameters_bytes > 4 * 100_000  # over 100,000 fp32 weights
        assert any(allocation.stack for allocation in oom.top)
        assert any(allocation.module for allocation in oom.top)


def test_a_fraction_of_memory_is_of_all_of_it() -> None:
    """PyTorch takes per_process_memory_fraction of the device's memory, the CUDA context's part included."""
    recipe, device = tiny(seq_len=64, micro_batch_size=8), with_mib(200)
    reserved = simulated(recipe, device).memory.peak_reserved_bytes or 0
    enough, too_little = ((reserved + bytes_) / device.memory_bytes for bytes_ in (MiB, -MiB))
    assert simulated(recipe, device, settings=f"per_process_memory_fraction:{enough:.6f}").oom is None
    assert simulated(recipe, device, settings=f"per_process_memory_fraction:{too_little:.6f}").oom is not None


def test_gradients_and_moments_fill_memory_too(tmp_path: Path) -> None:
    """With room for weights, gradients and most of two moments, the optimizer's first step is the end."""
    recipe = cut(load_recipe("llama-3.2-1b-bf16", ["seq_len=16", "precision=fp16"])[1], tmp_path)
    weights = simulated(recipe).memory.at_peak.parameters_bytes or 0
    profile = simulated(recipe, with_mib(round(3.9 * weights / MiB)))
    assert profile.oom is not None
    assert profile.oom.phase == "optimizer_step"
    at_peak = profile.memory.at_peak
    assert profile.memory.first_step_peak_allocated_bytes == at_peak.total_bytes()
    assert at_peak.parameters_bytes == weights
    assert at_peak.gradients_bytes == pytest.approx(weights, rel=0.001)
    assert 0 < (at_peak.optimizer_state_bytes or 0) < 2 * weights


def test_torch_is_as_it_was_when_a_simulation_was_the_first_to_ask_for_constructors() -> None:
    """transformers asks torch.tensor for the device in use: a wrong answer leaves buffers without values."""
    _device_constructors.cache_clear()
    simulate(tiny("llama"), find_hardware("l4"))
    with torch.device("meta"):
        assert torch.tensor([]).is_meta


def test_kernels_that_could_not_be_asked_for_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes' tables of its 4-bit kernel have private names."""
    recipe = tiny(quantization="nf4", adapter="lora")
    assert not any("4-bit" in warning for warning in simulated(recipe).warnings)
    monkeypatch.setattr(quantized, "bitsandbytes_cuda", lambda: None)
    assert any("from 8 rows on" in warning for warning in simulated(recipe).warnings)
    assert not any("4-bit" in warning for warning in simulated(tiny()).warnings)


@pytest.mark.parametrize(("mib", "rests"), [(40, False), (10, True)])
def test_a_step_that_fits_by_unified_memory_alone_says_so(tmp_path: Path, mib: int, rests: bool) -> None:
    """paged_adamw keeps tensors of 1e5 elements and more in unified memory, 8 bytes an element."""
    recipe = tiny(optimizer="paged_adamw", precision="bf16", seq_len=64)
    config = json.loads(Path(recipe.model).read_text()) | {"vocab_size": 20_000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    wide = recipe.model_copy(update={"model": str(tmp_path)})
    profile, memory = simulate(wide, find_hardware("a100-40gb"))
    paged = 2 * 20_000 * 64 * 2 * 4  # embeddings and head, two moments in fp32
    assert memory.host_peak_bytes >= paged
    just = (profile.memory.process_bytes or 0) + mib * 2**20
    small = simulate(wide, with_memory(find_hardware("a100-40gb"), just))[0]
    assert small.oom is None
    assert any("WSL" in warning for warning in small.warnings) == rests


def test_a_checkpoint_is_loaded_without_a_second_head() -> None:
    """Llama-3.2-1B in bf16: 1,235,814,400 weights, of which 128,256 * 2048 are embeddings and head. Drawn at
    random, the head has its own until it is tied. Against from_pretrained on a virtual GPU:
    tests/virtual_gpu/test_rank_setup.py."""
    sizes = {"model": "llama-3.2-1b", "precision": "bf16", "seq_len": 8}
    loaded, drawn = (
        simulate(Recipe(**sizes, weights=weights), find_hardware("h100"))[0].memory
        for weights in ("pretrained", "random")
    )
    setup_bytes = loaded.setup_peak_allocated_bytes or 0
    assert setup_bytes == pytest.approx(2 * 1_235_814_400, rel=0.001)
    again = (drawn.setup_peak_allocated_bytes or 0) - setup_bytes
    assert again == pytest.approx(2 * 128_256 * 2048, rel=0.01)
    assert loaded.peak_allocated_bytes == drawn.peak_allocated_bytes
