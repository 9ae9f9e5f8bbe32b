"""What a model's processor makes of images: how many tokens of a row, and which other inputs.

The processors themselves are not called: they need packages and files of their own, and these are a few lines
of arithmetic. Families go one of five ways, which are listed here; tests compare with the processors.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harness.data import NOT_PREDICTED
from harness.errors import InputError
from harness.parallel import DTYPES
from harness.recipe import Recipe
from harness.training.model_config import model_class, sees
from harness.training.tiles import CUT_OTHERWISE, MOST, pinpointed_tiles, tiles_of

BY_GRID = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4v",
    "glm4v_moe",
)
"""Types of model that resize each side of an image to the nearest multiple of a merged patch
(transformers/models/qwen2_vl/image_processing_qwen2_vl.py, smart_resize). The patches of all images are rows
of one tensor."""
BY_SIZE = ("mistral3", "lighton_ocr")
"""Types of model that resize each side to the next larger multiple of a merged patch
(transformers/models/pixtral/ image_processing_pixtral.py, get_resize_output_image_size)."""
WHOLE = ("gemma3", "llava", "vipllava")
"""Types of model that resize every image to the one size that the tower takes."""
TILED = tuple(MOST)
"""Types of model that cut every image into tiles of the size that the tower takes (training/tiles.py)."""
PINPOINTED = ("llava_next",)
"""Types of model that cut an image into the best of the grids in their config, and drop what is padding."""
KNOWN = (*BY_GRID, *BY_SIZE, *WHOLE, *TILED, *PINPOINTED)


@dataclass(frozen=True)
class Images:
    """The images of a row, all of one size."""

    count: int
    """How many images a row has."""
    tokens: int
    """How many of the row's tokens each image takes."""
    token: int
    """The word of the vocabulary that stands in their places."""
    reserved: frozenset[int]
    """Words that no text has: this one, and those for videos."""
    pixels: tuple[int, ...]
    """The shape of an image's part of pixel_values: patches, tiles or 1 image, and the numbers of each."""
    sizes: tuple[str, tuple[int, ...]] | None
    """The name of an input with a row for each image, and that row; None for models without such an input."""
    kinds: str | None
    """The name of an input that is 1 where a token is an image's and else 0; None for models without one."""
    dtype: torch.dtype = torch.float32
    """The dtype of pixel_values."""

    @property
    def _free(self) -> int:
        """A word that texts may have."""
        return next(word for word in range(len(self.reserved) + 1) if word not in self.reserved)

    def places(self, rows: int, seq_len: int) -> torch.Tensor:
        """Whether each token is an image's: bool (rows, seq_len). A word of text comes before each image."""
        places = torch.zeros(rows, seq_len, dtype=torch.bool)
        for n in range(self.count):
            first = 1 + n * (self.tokens + 1)
            places[:, first : first + self.tokens] = True
        return places

    def _integer_inputs(self, places: torch.Tensor) -> dict[str, torch.Tensor]:
        """The inputs `sizes` and `kinds`, which are the same for every row."""
        inputs: dict[str, torch.Tensor] = {}
        if self.sizes is not None:
            inputs[self.sizes[0]] = torch.tensor([self.sizes[1]] * (self.count * len(places)))
        if self.kinds is not None:
            inputs[self.kinds] = places.long()
        return inputs

    def shapes(self, rows: int, seq_len: int) -> dict[str, torch.Tensor]:
        """The inputs of a batch whose pixels are shapes alone. Integers are real: shapes depend on them."""
        places = self.places(rows, seq_len)
        count = rows * self.count * self.pixels[0]
        pixels = torch.zeros((), dtype=self.dtype).expand(count, *self.pixels[1:])
        ids = torch.where(places, self.token, self._free)
        return {"input_ids": ids, "pixel_values": pixels, **self._integer_inputs(places)}

    def into(self, batch: dict[str, Any], numbers: range, seed: int) -> dict[str, Any]:
        """`batch` with images of random pixels in its rows; `numbers` are the rows' places in the data."""
        ids, labels = batch["input_ids"], batch["labels"]
        for word in self.reserved:
            for tensor in (ids, labels):
                tensor[tensor == word] = self._free
        places = self.places(*ids.shape)
        ids[places], labels[places] = self.token, NOT_PREDICTED
        generators = [np.random.default_rng((seed, number, 1)) for number in numbers]
        shape = (self.count * self.pixels[0], *self.pixels[1:])
        pixels = np.concatenate([each.standard_normal(shape, dtype=np.float32) for each in generators])
        values = torch.from_numpy(pixels).to(self.dtype)
        return batch | {"pixel_values": values} | self._integer_inputs(places)


def images_of(recipe: Recipe, config: Any) -> Images | None:
    """The images of a row of `recipe` for the model of `config`; None for a recipe without images.

    Raises InputError for a model that takes no images or whose processor is not known here, for a missing
    image size, and for images that leave no token of seq_len to predict.
    """
    if not recipe.images:
        return None
    if not sees(recipe, config):
        raise InputError(
            f"images: {recipe.images}: {recipe.model} sees nothing: {config.model_type} is a model of text "
            "alone. Set images: 0, or choose a model that sees, like qwen2.5-vl-7b."
        )
    family, vision = config.model_type, config.vision_config
    token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    if family not in KNOWN or token is None:
        why = f"how the processor of {family} cuts an image into tokens is not known here"
        if family in CUT_OTHERWISE:
            why = f"the processor of {family} {CUT_OTHERWISE[family]}, which is not known here"
        raise InputError(
            f"images: {recipe.images}: {why}; that of {', '.join(KNOWN)} is. Set images: 0 to train "
            f"{recipe.model} on text."
        )
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
    sizes = None
    if family in WHOLE:
        side, patch = vision.image_size, vision.patch_size
        tokens = getattr(config, "mm_tokens_per_image", None) or (side // patch) ** 2 + _first_token(config)
        pixels: tuple[int, ...] = (1, channels, side, side)
    elif family in TILED:
        # of a square: a config has one number, or the same one for each side
        side, patch = (n if isinstance(n, int) else n[0] for n in (vision.image_size, vision.patch_size))
        tiles = tiles_of(family, side, *_height_and_width(recipe))
        shuffled = config.downsample_ratio if family == "internvl" else vision.pixel_shuffle_ratio
        tokens = tiles * round((side // patch * shuffled) ** 2)
        pixels = (tiles, channels, side, side)
    elif family in PINPOINTED:
        side, size = vision.image_size, _height_and_width(recipe)
        tiles, tokens = pinpointed_tiles(config, size)
        pixels, sizes = (1, tiles, channels, side, side), ("image_sizes", size)
    else:
        patch, merged = vision.patch_size, getattr(vision, "spatial_merge_size", None)
        merged = merged or config.spatial_merge_size
        height, width = (_multiple(side, patch * merged, family) for side in _height_and_width(recipe))
        rows, columns = height // patch, width // patch
        tokens = rows * columns // merged**2
        if family in BY_GRID:
            pixels = (rows * columns, channels * vision.temporal_patch_size * patch**2)
            sizes = "image_grid_thw", (1, rows, columns)
        else:
            pixels, sizes = (1, channels, height, width), ("image_sizes", (height, width))
    taken = recipe.images * (tokens + 1)
    if taken >= recipe.seq_len:
        raise InputError(
            f"images: {recipe.images} with seq_len: {recipe.seq_len}: {recipe.model} makes an image "
            f"{tokens:,} tokens with a word before them, which leaves nothing to learn. Set seq_len to more "
            f"than {taken:,}, or make images fewer or smaller."
        )
    parameters = inspect.signature(model_class(recipe, config).forward).parameters
    kinds = next((name for name in ("mm_token_type_ids", "token_type_ids") if name in parameters), None)
    others = (getattr(config, name, None) for name in ("video_token_id", "video_token_index"))
    reserved = frozenset({token, *(other for other in others if other is not None)})
    dtype = torch.float32
    if family == "llama4":  # its processor makes bf16, and its tower takes only the dtype of its weights
        dtype = DTYPES[recipe.compute_dtype]
    return Images(recipe.images, tokens, token, reserved, pixels, sizes, kinds, dtype)


def _first_token(config: Any) -> int:
    """How many tokens an image has besides those of its patches: CLIP's towers have one, which the strategy
    "default" leaves out."""
    whole = getattr(config, "vision_feature_select_strategy", "default") == "full"
    return int(whole and config.vision_config.model_type.startswith("clip"))


def _height_and_width(recipe: Recipe) -> tuple[int, int]:
    """The recipe's image_size in pixels. Raises InputError if it is not set."""
    if not recipe.image_size:
        raise InputError(
            f"images: {recipe.images}: {recipe.model} sees images of any size, and image_size does not say "
            "which; set for example image_size: [1024, 1024]."
        )
    return recipe.image_size[0], recipe.image_size[-1]


def _multiple(side: int, of: int, family: str) -> int:
    """The pixels of a side after it is resized to a multiple of `of`."""
    return of * (max(1, round(side / of)) if family in BY_GRID else -(-side // of))
