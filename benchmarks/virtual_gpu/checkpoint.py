"""What programs of others read: a checkpoint of zeros, which takes no place on a disk, and rows of text.

    python -m benchmarks.virtual_gpu.checkpoint hugging-face recipes/models/llama-3.1-8b.json FOLDER
    python -m benchmarks.virtual_gpu.checkpoint litgpt pythia-14m FOLDER
    python -m benchmarks.virtual_gpu.checkpoint rows preferences FOLDER

Nothing is downloaded. The files have the sizes, names and dtypes of real ones, and no blocks: they are holes.
"""

import base64
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import parser_of
from harness.errors import InputError
from harness.zeros import write_byte_tokens, write_weights

BEGIN, END, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>"
LLAMA_3 = {BEGIN: 128000, END: 128001, PAD: 128004}
"""Of Llama 3's tokenizer; torchtune has the same numbers built in."""
DTYPE = torch.bfloat16


def hugging_face(config: dict[str, Any], folder: Path) -> None:
    """config.json, model.safetensors of the whole size, and a tokenizer, in the layout of the Hub."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    settings = AutoConfig.for_model(**config)
    with torch.device("meta"):
        made = type(AutoModelForCausalLM.from_config(settings)).__name__
    settings.architectures, settings.dtype = [made], DTYPE
    settings.save_pretrained(folder)
    write_weights(json.loads((folder / "config.json").read_bytes()), folder)
    special = LLAMA_3 if settings.vocab_size > max(LLAMA_3.values()) else {BEGIN: 256, END: 257, PAD: 258}
    tokenizer(special, folder)


def litgpt(name: str, folder: Path) -> None:
    """lit_model.pth of the whole size, model_config.yaml and a tokenizer, for a model of LitGPT's table."""
    folder.mkdir(parents=True, exist_ok=True)
    library = import_module("litgpt")
    config = library.Config.from_name(name)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device("meta"):
            model = library.GPT(config)
    finally:
        torch.set_default_dtype(before)
    with torch.serialization.skip_data():
        torch.save(model.to_empty(device="cpu").state_dict(), folder / "lit_model.pth")
    import_module("litgpt.utils").save_config(config, folder)
    tokenizer({BEGIN: 256, END: 257, PAD: 258}, folder)


def tokenizer(special: dict[str, int], folder: Path) -> None:
    """A token for each byte: tokenizer.json and its configuration, and tokenizer.model as Llama 3 has it."""
    write_byte_tokens(special, folder)
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration))
    lines = (f"{base64.b64encode(bytes([number])).decode()} {number}\n" for number in range(256))
    (folder / "tokenizer.model").write_text("".join(lines))


def rows(kind: str, folder: Path, count: int = 64, length: int = 64) -> None:
    """`count` rows of about 1.5 * `length` tokens each: a token is a byte, and a third is the prompt."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [ROWS[kind](number, length) for number in range(count)]
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in made))
    (folder / "rows.json").write_text(json.dumps(made))


def _words(words: str, length: int) -> str:
    return (words * (length // len(words) + 1))[:length]


def _instruction(number: int, length: int) -> dict[str, str]:
    question = f"question {number}: " + _words("what is known of this? ", length // 2)
    return {"instruction": question, "input": "", "output": _words("an answer of some length ", length)}


def _completion(number: int, length: int) -> dict[str, str]:
    row = _instruction(number, length)
    return {"prompt": row["instruction"], "completion": row["output"]}


def _preference(number: int, length: int) -> dict[str, str]:
    row = _completion(number, length)
    return {"prompt": row["prompt"], "chosen": row["completion"], "rejected": _words("no ", length)}


def _prompt(number: int, length: int) -> dict[str, str]:
    return {"prompt": _completion(number, length)["prompt"]}


def _text(number: int, length: int) -> dict[str, str]:
    row = _completion(number, length)
    return {"text": row["prompt"] + row["completion"]}


ROWS = {
    "instructions": _instruction,
    "completions": _completion,
    "preferences": _preference,
    "prompts": _prompt,
    "texts": _text,
}


def main() -> int:
    parser = parser_of("benchmarks.virtual_gpu.checkpoint", __doc__)
    parser.add_argument("kind", choices=("hugging-face", "litgpt", "rows"))
    parser.add_argument("what", help="a config.json, a name of LitGPT's, or a kind of rows")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    if options.kind == "hugging-face":
        hugging_face(json.loads(Path(options.what).read_bytes()), options.folder)
    elif options.kind == "litgpt":
        litgpt(options.what, options.folder)
    elif options.what in ROWS:
        rows(options.what, options.folder, length=options.length)
    else:
        raise InputError(f"there are no rows {options.what}. There are: {', '.join(ROWS)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
