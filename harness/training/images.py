"""What a model's processor makes of images: how many tokens of a row, and which inputs beside them.

The processors' own classes are not asked: they need packages and files of their own for a few lines of
arithmetic. Which of four ways a family's takes is told here, and tests compare with the processors.
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
from harness.training.tiles import CUT_OTHERWISE, MOST, tiles_of

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
"""Each side becomes the nearest multiple of a merged patch (transformers/models/qwen2_vl/
image_processing_qwen2_vl.py, smart_resize), and the patches of all images are rows of one tensor."""
BY_SIZE = ("mistral3", "lighton_ocr")
"""Each side becomes the next multiple of a merged patch (transformers/models/pixtral/
image_processing_pixtral.py, get_resize_output_image_size)."""
WHOLE = ("gemma3", "llava", "vipllava")
"""Every image becomes as large as the tower was made for."""
TILED = tuple(MOST)
"""Every image becomes tiles, each as large as the tower was made for (training/tiles.py)."""
KNOWN = (*BY_GRID, *BY_SIZE, *WHOLE, *TILED)


@dataclass(frozen=True)
class Images:
    """The images of a row, all of one size."""

    count: int
    tokens: int
    """Of a row, for each image."""
    token: int
    """The word that stands for them."""
    reserved: frozenset[int]
    """Words that no text has: this one, and those for videos."""
    pixels: tuple[int, ...]
    """What an image adds to pixel_values: patches, tiles, or 1 image; and the numbers of each."""
    sizes: tuple[str, tuple[int, ...]] | None
    """An input with a row for each image, and that row."""
    kinds: str | None
    """The name of an input that is 1 where a token stands for an image, and else 0."""
    dtype: torch.dtype = torch.float32
    """Of pixel_values."""

    @property
    def _free(self) -> int:
        return next(word for word in range(len(self.reserved) + 1) if word not in self.reserved)

    def places(self, rows: int, seq_len: int) -> torch.Tensor:
        """Which tokens are those of images: bool (rows, seq_len). A word stands before each image."""
        found = torch.zeros(rows, seq_len, dtype=torch.bool)
        for n in range(self.count):
            first = 1 + n * (self.tokens + 1)
            found[:, first : first + self.tokens] = True
        return found

    def beside(self, places: torch.Tensor) -> dict[str, torch.Tensor]:
        """The inputs that are integers, and have the same values in every row."""
        made: dict[str, torch.Tensor] = {}
        if self.sizes is not None:
            made[self.sizes[0]] = torch.tensor([self.sizes[1]] * (self.count * len(places)))
        if self.kinds is not None:
            made[self.kinds] = places.long()
        return made

    def shapes(self, rows: int, seq_len: int) -> dict[str, torch.Tensor]:
        """The inputs of a batch whose pixels are shapes alone. Integers are real: what they say decides about
        shapes."""
        places = self.places(rows, seq_len)
        count = rows * self.count * self.pixels[0]
        pixels = torch.zeros((), dtype=self.dtype).expand(count, *self.pixels[1:])
        ids = torch.where(places, self.token, self._free)
        return {"input_ids": ids, "pixel_values": pixels, **self.beside(places)}

    def into(self, batch: dict[str, Any], numbers: range, seed: int) -> dict[str, Any]:
        """`batch`, whose rows have these numbers, with images of random pixels."""
        ids, labels = batch["input_ids"], batch["labels"]
        for word in self.reserved:
            for tensor in (ids, labels):
                tensor[tensor == word] = self._free
        places = self.places(*ids.shape)
        ids[places], labels[places] = self.token, NOT_PREDICTED
        drawn = [np.random.default_rng((seed, number, 1)) for number in numbers]
        shape = (self.count * self.pixels[0], *self.pixels[1:])
        pixels = np.concatenate([each.standard_normal(shape, dtype=np.float32) for each in drawn])
        return batch | {"pixel_values": torch.from_numpy(pixels).to(self.dtype)} | self.beside(places)


def images_of(recipe: Recipe, config: Any) -> Images | None:
    """The images of a row of `recipe` for the model of `config`; None where there are none.

    Raises InputError for a model that sees nothing or whose processor is not known here, for a size that is
    missing, and for images that leave no token of seq_len to predict.
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
        side, patch = (_first(each) for each in (vision.image_size, vision.patch_size))
        tiles = tiles_of(family, side, *_asked(recipe))
        shuffled = config.downsample_ratio if family == "internvl" else vision.pixel_shuffle_ratio
        tokens = tiles * round((side // patch * shuffled) ** 2)
        pixels = (tiles, channels, side, side)
    else:
        patch, merged = vision.patch_size, getattr(vision, "spatial_merge_size", None)
        merged = merged or config.spatial_merge_size
        height, width = (_multiple(side, patch * merged, family) for side in _asked(recipe))
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
    asks = inspect.signature(model_class(recipe, config).forward).parameters
    kinds = next((name for name in ("mm_token_type_ids", "token_type_ids") if name in asks), None)
    others = (getattr(config, name, None) for name in ("video_token_id", "video_token_index"))
    reserved = frozenset({token, *(other for other in others if other is not None)})
    dtype = torch.float32
    if family == "llama4":  # its processor makes bf16, and its tower takes its weights' dtype alone
        dtype = DTYPES[recipe.compute_dtype]
    return Images(recipe.images, tokens, token, reserved, pixels, sizes, kinds, dtype)


def _first(value: Any) -> int:
    """Of a number for each side, which are the same."""
    return value if isinstance(value, int) else value[0]


def _first_token(config: Any) -> int:
    """CLIP's towers have a token beside those of the patches, which the strategy "default" leaves out."""
    whole = getattr(config, "vision_feature_select_strategy", "default") == "full"
    return int(whole and config.vision_config.model_type.startswith("clip"))


def _asked(recipe: Recipe) -> tuple[int, int]:
    if not recipe.image_size:
        raise InputError(
            f"images: {recipe.images}: {recipe.model} sees images of any size, and image_size does not say "
            "which; set for example image_size: [1024, 1024]."
        )
    return recipe.image_size[0], recipe.image_size[-1]


def _multiple(side: int, of: int, family: str) -> int:
    """The number of pixels that a side has when it has been resized."""
    return of * (max(1, round(side / of)) if family in BY_GRID else -(-side // of))
