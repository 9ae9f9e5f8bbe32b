"""Images in the rows: transformers' own loss and gradients, and what its processors make of images."""

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

from benchmarks.causal_models.tiny import small_config
from benchmarks.causal_models.vision import IMAGES, with_small_tower
from harness.data import NOT_PREDICTED
from harness.errors import InputError
from harness.measure.cpu import CpuObserver
from harness.parallel import ALONE
from harness.recipe import Recipe, check_recipe
from harness.training.batches import Batches, StepBatches
from harness.training.images import Images, images_of
from harness.training.loop import batches_of, set_up
from harness.training.model_config import load_config
from harness.training.step import Training, train_step
from harness.training.tiles import tiles_of

KINDS = ("qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "llava_next", "mistral3", "internvl", "llama4")
CPU = torch.device("cpu")
reads_its_images = pytest.mark.skipif(
    version("transformers").startswith("5.24."),
    reason="the forward of transformers 5.24 reads image_outputs, which its output does not have",
)


def seeing(folder: Path, kind: str, **fields: Any) -> Recipe:
    """A recipe for a small model of a type that sees."""
    path = folder / f"{kind}.json"
    path.write_text(json.dumps(with_small_tower(small_config(CONFIG_MAPPING[kind]()))))
    return check_recipe({"model": str(path), "precision": "fp32", **IMAGES, **fields}, kind)


def built(recipe: Recipe) -> tuple[Training, Batches]:
    return set_up(recipe, CPU, CpuObserver(follow_first_step=False))


def images(recipe: Recipe) -> Images:
    found = images_of(recipe, load_config(recipe))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=reads_its_images) if kind == "llama4" else kind for kind in KINDS]
)
@pytest.mark.parametrize("trains", [False, True])
def test_a_step_is_the_one_of_transformers_own_loss(kind: str, trains: bool, tmp_path: Path) -> None:
    recipe = seeing(tmp_path, kind, train_vision=trains, optimizer="sgd", learning_rate=0.5)
    training, batches = built(recipe)
    model: Any = training.model
    ours = {name: weight.clone() for name, weight in model.state_dict().items()}
    (batch,), num_tokens = next(batches)

    theirs = AutoModelForImageTextToText.from_config(load_config(recipe), attn_implementation="sdpa").train()
    theirs.load_state_dict(ours)
    loss = theirs(**batch).loss
    loss.backward()
    observer = CpuObserver(follow_first_step=False)
    found = train_step(training, [batch], num_tokens, observer)

    torch.testing.assert_close(found, loss.detach())
    gradients = {name: weight.grad for name, weight in theirs.named_parameters()}
    towers = ("visual", "vision_tower", "vision_model", "projector")
    seen = 0
    for name, weight in model.named_parameters():
        of_tower = any(part in name for part in towers)
        seen += of_tower
        gradient = gradients[name] if trains or not of_tower else None
        stepped = ours[name] if gradient is None else ours[name] - 0.5 * gradient
        torch.testing.assert_close(weight.detach(), stepped)
    assert seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapts", [False, True])
def test_lora_is_on_the_decoder_unless_the_tower_is_trained(kind: str, adapts: bool, tmp_path: Path) -> None:
    training, _ = built(seeing(tmp_path, kind, adapter="lora", train_vision=adapts))
    trained = [name for name, weight in training.model.named_parameters() if weight.requires_grad]
    outside = [name for name in trained if ".language_model." not in name]
    assert len(trained) > len(outside)
    assert bool(outside) is adapts


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_are_those_of_real_batches(kind: str, tmp_path: Path) -> None:
    recipe = seeing(tmp_path, kind, micro_batch_size=3)
    real: StepBatches = next(batches_of(recipe, load_config(recipe), ALONE, shapes_only=False))
    shapes: StepBatches = next(batches_of(recipe, load_config(recipe), ALONE, shapes_only=True))
    one, other = real.batches[0], shapes.batches[0]
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.shape, tensor.dtype) == (other[name].shape, other[name].dtype)
        if name not in ("input_ids", "labels", "pixel_values"):
            assert torch.equal(tensor, other[name])


def test_image_tokens_are_in_every_row_and_have_no_label(tmp_path: Path) -> None:
    recipe = seeing(tmp_path, "qwen2_5_vl")
    found = images(recipe)
    batch = next(batches_of(recipe, load_config(recipe), ALONE, shapes_only=False)).batches[0]
    places = batch["input_ids"] == found.token
    assert places.sum(dim=1).tolist() == [2 * found.tokens] * 2  # none of the text is one by chance
    assert torch.equal(places.long(), batch["mm_token_type_ids"])
    assert set(batch["labels"][places].tolist()) == {NOT_PREDICTED}
    assert (batch["labels"][~places][1:] != NOT_PREDICTED).any()


@pytest.mark.parametrize(("height", "width"), [(300, 500), (1024, 1024), (28, 450), (1000, 333)])
@pytest.mark.parametrize(
    "kind",
    ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "mistral3", "gemma3", "llava", "internvl", "llava_next"],
)
def test_inputs_are_those_of_the_processor(kind: str, height: int, width: int, tmp_path: Path) -> None:
    recipe = seeing(tmp_path, kind, images=1, image_size=[height, width], seq_len=8192, precision="bf16")
    config = load_config(recipe)
    made = _processor(kind, config)(np.zeros((3, height, width), dtype=np.uint8), return_tensors="pt")
    found = images(recipe)
    assert found.pixels == tuple(made["pixel_values"].shape)
    assert made["pixel_values"].dtype == found.dtype
    if found.sizes is None:
        return
    name, sizes = found.sizes
    assert [*sizes] == made[name][0].tolist()
    if kind == "llava_next":
        assert found.tokens == _tokens_of_llava_next(config, height, width)
        return
    merged = getattr(config.vision_config, "spatial_merge_size", None) or config.spatial_merge_size
    if name == "image_grid_thw":  # Qwen2_5_VLProcessor.replace_image_token
        assert found.tokens == int(made[name][0].prod()) // merged**2
    else:  # PixtralProcessor: a token for each merged patch
        each = config.vision_config.patch_size * merged
        assert found.tokens == (sizes[0] // each) * (sizes[1] // each)


def _processor(kind: str, config: Any) -> Any:
    """transformers' own for the type, with the sizes of `config` and no limits."""
    if kind in ("gemma3", "llava"):
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        side = config.vision_config.image_size
        square = {"height": side, "width": side}
        if kind == "gemma3":
            return Gemma3ImageProcessorPil(size=square)
        return CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=square)
    if kind == "llava_next":
        from transformers.models.llava_next import image_processing_pil_llava_next as of_llava_next

        side, grids = config.vision_config.image_size, config.image_grid_pinpoints
        square, resized = {"height": side, "width": side}, {"shortest_edge": side}
        return of_llava_next.LlavaNextImageProcessorPil(
            size=resized, crop_size=square, image_grid_pinpoints=grids
        )
    if kind == "internvl":
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

        height, width = config.vision_config.image_size
        return GotOcr2ImageProcessorPil(size={"height": height, "width": width}, crop_to_patches=True)
    patch = config.vision_config.patch_size
    if kind == "mistral3":
        from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

        each = patch * config.spatial_merge_size
        return PixtralImageProcessorPil(
            size={"longest_edge": 4096}, patch_size={"height": each, "width": each}
        )
    sizes: dict[str, Any] = {"size": {"shortest_edge": 1, "longest_edge": 10**9}, "patch_size": patch}
    if kind == "glm4v":
        from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

        return Glm4vImageProcessorPil(**sizes)
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(**sizes)


def _tokens_of_llava_next(config: Any, height: int, width: int) -> int:
    """As LlavaNextProcessor counts them, whose own arithmetic it is; CLIP's tower has a token of its own."""
    side = config.vision_config.image_size
    processor: Any = object.__new__(LlavaNextProcessor)
    processor.image_processor = SimpleNamespace(image_grid_pinpoints=config.image_grid_pinpoints)
    processor.patch_size, processor.num_additional_image_tokens = config.vision_config.patch_size, 1
    whole = processor._get_number_of_features(height, width, side, side)
    return whole - 1  # by the strategy "default" the model leaves that token out


@pytest.mark.parametrize(
    ("height", "width", "tiles"),
    [
        (336, 336, 1),
        (672, 672, 4 + 1),
        (300, 500, 2 + 1),  # 336 x 672 enlarges it by 1.12, two rows of two by 1.34
        (3000, 100, 9 + 1),  # nine rows are 3024 high
        (3000, 5000, 15 + 1),  # fits into none; three rows of five reduce it to 0.336, four of four to 0.2688
    ],
)
def test_llama_4_cuts_an_image_into_the_tiles_that_change_its_size_least(
    height: int, width: int, tiles: int
) -> None:
    """By hand, and by transformers' own processor where torchvision is installed."""
    assert tiles_of("llama4", 336, height, width) == tiles
    pytest.importorskip("torchvision")
    from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor

    made = Llama4ImageProcessor()(torch.zeros(3, height, width, dtype=torch.uint8), return_tensors="pt")
    assert made["pixel_values"].shape == (tiles, 3, 336, 336)
    assert made["pixel_values"].dtype == torch.bfloat16


def test_what_a_published_model_makes_of_an_image() -> None:
    """Gemma 3: 256 tokens of 896 x 896 (arXiv 2503.19786, section 2.1). Qwen2.5-VL: 1036 x 1036 are 74 x 74
    patches of 14, four of which are a token (arXiv 2502.13923, section 2.1)."""
    gemma = check_recipe({"model": "gemma-3-4b-vision", "images": 1}, "here")
    assert (images(gemma).tokens, images(gemma).pixels) == (256, (1, 3, 896, 896))
    qwen = check_recipe({"model": "qwen2.5-vl-7b", "images": 1, "image_size": 1024}, "here")
    assert (images(qwen).tokens, images(qwen).sizes) == (1369, ("image_grid_thw", (1, 74, 74)))
    # Llama 4: 24 x 24 patches of a tile, four of which are a token; four tiles, and the whole
    llama = check_recipe({"model": "llama-4-scout", "images": 1, "image_size": 672}, "here")
    assert (images(llama).tokens, images(llama).pixels) == (5 * 144, (5, 3, 336, 336))


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        ("qwen2_5_vl", {"image_size": [1024, 1024]}, "Set seq_len to more than 2,740"),
        ("qwen2_5_vl", {"image_size": []}, "set for example image_size"),
        ("smolvlm", {}, "the processor of smolvlm pads every row's images .* its memory depends on values"),
        ("llava_onevision", {}, "the processor of llava_onevision makes the tiles' features fewer"),
        ("idefics", {}, "how the processor of idefics cuts an image into tokens is not known"),
        ("llama", {}, "is a model of text alone"),
    ],
)
def test_what_cannot_be_is_said(kind: str, fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    recipe = seeing(tmp_path, kind, **fields)
    with pytest.raises(InputError, match=says):
        built(recipe)


def test_without_images_the_tower_is_there_and_frozen(tmp_path: Path) -> None:
    training, batches = built(seeing(tmp_path, "qwen2_5_vl", images=0, image_size=[]))
    tower = [weight for name, weight in training.model.named_parameters() if ".visual." in name]
    assert tower
    assert not any(weight.requires_grad for weight in tower)
    assert next(batches).batches[0].keys() == {"input_ids", "labels"}
