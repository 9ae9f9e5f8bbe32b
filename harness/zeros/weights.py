"""The weights of a checkpoint of zeros: safetensors files of a header and a hole, without disk space.

Like the checkpoints that models are published as, a large one has several files: who loads one maps each into
memory, and the kernel refuses a file that is larger than the machine's.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.errors import InputError

_NAMES = {
    **{"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"},
}
"""The names that safetensors has for torch's dtypes."""
MOST_OF_A_FILE = 4 * 2**30
"""The most bytes of weights that a file has, unless a single one is larger."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PREQUANTIZED = "quantization_config"
"""The field of a config whose weights are saved quantized."""


def write_weights(config: Mapping[str, Any], folder: Path) -> int:
    """Write the weights of the model that `config` (the content of a config.json) describes into `folder`,
    with the names and shapes that the class under `architectures` saves, in the config's dtype, or else fp32:
    model.safetensors, or several files and their index. Returns the bytes of the weights.

    Raises InputError for a class that the installed transformers does not have, for weights that are
    quantized already, and for a file that cannot be written.
    """
    import torch

    if config.get(PREQUANTIZED):
        raise InputError(
            "the config is of weights that are quantized already (quantization_config), whose shapes it does "
            "not say. Give the config of the model that they were made from."
        )
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    with torch.device("meta"):
        model = _model(config, getattr(torch, dtype, torch.float32))
    tied = set(getattr(model, "all_tied_weights_keys", ()))
    weights = {name: weight for name, weight in model.state_dict().items() if name not in tied}
    parts: list[dict[str, Any]] = [{}]
    for name, weight in weights.items():
        if parts[-1] and sum(w.nbytes for w in parts[-1].values()) + weight.nbytes > MOST_OF_A_FILE:
            parts.append({})
        parts[-1][name] = weight
    names = [f"model-{n:05}-of-{len(parts):05}.safetensors" for n in range(1, len(parts) + 1)]
    if len(parts) == 1:
        names = [WEIGHTS]
    total = sum(weight.nbytes for weight in weights.values())
    try:
        for name, part in zip(names, parts, strict=True):
            _write_file(part, folder / name)
        if len(parts) > 1:
            files = {weight: name for name, part in zip(names, parts, strict=True) for weight in part}
            index = {"metadata": {"total_size": total}, "weight_map": files}
            (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write into {folder}: {error.strerror}. Give another folder.") from None
    return total


def _write_file(weights: Mapping[str, Any], path: Path) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in weights.items():
        begin, end = end, end + weight.nbytes
        kind = _NAMES[str(weight.dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": list(weight.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _model(config: Mapping[str, Any], dtype: Any) -> Any:
    """The model of a config, on the current default device. Raises InputError."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    name = next(iter(config.get("architectures") or ()), None)
    try:
        settings = AutoConfig.for_model(**config)
        model_class = AutoModelForCausalLM if name is None else getattr(transformers, name, None)
        if model_class is None:
            raise InputError(
                f"the config is of a {name}, which transformers {transformers.__version__} does not have. "
                "Models that bring code of their own cannot be made of zeros."
            )
        model = model_class.from_config(settings) if name is None else model_class(settings)
        return model.to(dtype)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"transformers cannot build a model of the config: {error}") from None
