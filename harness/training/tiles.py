"""How many tiles a processor cuts an image into, for models whose image towers take squares of one size.

The largest numbers of tiles are the processors' defaults, with which the models are published. Other families
cut images too, and are refused (CUT_OTHERWISE).
"""

from typing import Any

import torch

MOST = {"internvl": 12, "llama4": 16}
"""By type of model: the most tiles of an image. If there are several, the whole image is one more."""
CUT_OTHERWISE = {
    **dict.fromkeys(
        ("idefics2", "idefics3", "smolvlm"),
        "pads every row's images to as many tiles, and its model looks at the pixels to leave the padding "
        "out: its memory depends on values",
    ),
    "llava_onevision": "makes the tiles' features fewer where an image has many",
}
"""By type of model: why the tiles of its processor are not counted here."""


def tiles_of(family: str, side: int, height: int, width: int) -> int:
    """How many tiles of `side` x `side` pixels an image of `height` x `width` becomes."""
    cut = _nearest_in_shape if family == "internvl" else _least_resized
    count = cut(MOST[family], side, height, width)
    return count + (count > 1)


def pinpointed_tiles(config: Any, size: tuple[int, int]) -> tuple[int, int]:
    """The tiles and the tokens of an image of `size` (height, width), by functions of the model itself: the
    whole image; then the best grid's tiles, less what is padding, with a token at the end of each row."""
    from transformers.models.llava_next import modeling_llava_next as model

    vision, grids = config.vision_config, config.image_grid_pinpoints
    rows, columns = model.get_anyres_image_grid_shape(size, grids, vision.image_size)
    side = vision.image_size // vision.patch_size
    features = torch.empty(1, rows * side, columns * side, device="meta")
    _, height, width = model.unpad_image(features, size).shape
    return rows * columns + 1, side**2 + height * (width + 1)


def _grids(most: int) -> list[tuple[int, int]]:
    """All (rows, columns) of at most `most` tiles, those with few tiles, and of these few columns, first."""
    grids = [(n, m) for m in range(1, most + 1) for n in range(1, most // m + 1)]
    return sorted(grids, key=lambda grid: grid[0] * grid[1])


def _nearest_in_shape(most: int, side: int, height: int, width: int) -> int:
    """The tiles of the grid whose aspect ratio is nearest to the image's; of equally near ones the largest
    whose tiles have less than twice the image's pixels
    (transformers/models/got_ocr2/image_processing_got_ocr2.py, get_optimal_tiled_canvas)."""
    best, least = 1, float("inf")
    for rows, columns in _grids(most):
        difference, count = abs(width / height - columns / rows), rows * columns
        if difference < least or (difference == least and 2 * height * width > side**2 * count):
            best, least = count, difference
    return best


def _least_resized(most: int, side: int, height: int, width: int) -> int:
    """The tiles of the grid that the image fits into with the least enlargement; or, if it fits into none,
    with the least reduction. Of equal grids the smallest
    (transformers/models/llama4/image_processing_llama4.py, get_best_fit)."""
    scales = {grid: min(grid[0] * side / height, grid[1] * side / width) for grid in _grids(most)}
    scale = min((each for each in scales.values() if each >= 1), default=max(scales.values()))
    return min(rows * columns for (rows, columns), each in scales.items() if each == scale)
