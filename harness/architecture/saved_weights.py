"""Checkpoints whose weights are saved quantized: a recipe's `quantization` decides how they are counted."""

from harness.architecture.config_file import read_config
from harness.architecture.model_id import find_config
from harness.errors import InputError
from harness.recipe import Recipe
from harness.system import is_object


def surprises_of_saved_weights(recipe: Recipe) -> list[str]:
    """A warning if the config of the recipe's model says that its weights are quantized, and the recipe does
    not; none for a model whose config is not here."""
    try:
        saved: object = read_config(find_config(recipe.model)).get("quantization_config")
    except InputError:
        return []
    if recipe.quantized or not saved or not is_object(saved):
        return []
    sentence = (
        f"model: its config says that the weights are saved quantized ({saved.get('quant_method')}). They "
        "are counted as they were before, in the recipe's precision. For LoRA on a base that stays in 4 bit "
        "write adapter: lora with quantization: nf4; in 8 bit, quantization: int8"
    )
    return [sentence]
