"""Rules (rules.py) about images in the rows, and what cannot be set with them."""

from harness.recipe.rule import Rule

VISION_RULES: tuple[Rule, ...] = (
    Rule(
        ("image_size", "images"),
        lambda r: r.image_size != () and not r.images,
        "there is no image that is so large; set images: 1, or image_size: []",
    ),
    Rule(
        ("train_vision", "images"),
        lambda r: r.train_vision and not r.images,
        "without an image nothing reaches the tower; set images: 1, or train_vision: false",
    ),
    Rule(
        ("images", "data"),
        lambda r: r.images > 0 and r.data != "synthetic",
        "no file with images is read yet; set data: synthetic, or images: 0",
    ),
    Rule(
        ("images", "packing"),
        lambda r: r.images > 0 and r.packing,
        "images are at the beginning of a row, not of the documents in it; set packing: false",
    ),
    Rule(
        ("images", "task"),
        lambda r: r.images > 0 and not r.writes,
        "pairs, and texts with a label, have no images yet; set task: sft, or images: 0",
    ),
    Rule(
        ("images", "parallel"),
        lambda r: r.images > 0 and r.distributed,
        "how several ranks train a model that sees was not tried here; set parallel: none",
    ),
    Rule(
        ("images", "offload"),
        lambda r: r.images > 0 and bool(r.offload),
        "offloading a model that sees was not tried here; set offload: []",
    ),
    Rule(
        ("images", "compile"),
        lambda r: r.images > 0 and r.compile,
        "the compiled step of a model that sees is not built here; set compile: false",
    ),
)
