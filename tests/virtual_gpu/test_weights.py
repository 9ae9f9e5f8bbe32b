"""Models that a program loads and that are not here: zeros in their place, and PyTorch's peak as it is."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.questions import QUESTIONS, RESULTS, ask

pytestmark = pytest.mark.virtual_gpu
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 512,
}
CONFIG |= {"intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8, "dtype": "bfloat16"}
TRAINS = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
if "save" in sys.argv:
    settings = AutoConfig.from_pretrained(sys.argv[1])
    AutoModelForCausalLM.from_config(settings, dtype=settings.dtype).save_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).cuda()
for _ in range(2):  # the sentence is said once
    again = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model(torch.ones(2, 64, dtype=torch.int64, device="cuda")).logits.float().sum().backward()
print(model.dtype, torch.cuda.max_memory_allocated())
"""
KNOWN = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
name = "openai-community/gpt2"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name).cuda()
ids = tokenizer(["some text", "more"], padding=True, return_tensors="pt")["input_ids"].cuda()
model(ids, labels=ids).loss.backward()
print(sum(weight.numel() for weight in model.parameters()), tuple(ids.shape), tokenizer.eos_token_id)
"""


def write_config(folder: Path, **more: Any) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **more}))
    return str(folder)


@pytest.fixture(autouse=True)
def _own_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_a_folder_without_weights(emulate, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    bare, whole = write_config(tmp_path / "bare"), write_config(tmp_path / "whole")
    done = emulate(sys.executable, "train.py", bare)
    saved = emulate(sys.executable, "train.py", whole, "save")
    assert done.stdout == saved.stdout
    assert done.stdout.startswith("torch.bfloat16 ")
    assert done.stderr.count("are not here: zeros take their place") == 1
    assert "zeros" not in saved.stderr
    assert [path.name for path in Path(bare).iterdir()] == ["config.json"]


def test_an_id_of_which_the_cache_has_the_config(emulate, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    repository = tmp_path / "hub/hub/models--someone--model"
    write_config(repository / "snapshots/0123")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0123")
    bare = write_config(tmp_path / "bare")
    done = emulate(sys.executable, "train.py", "someone/model")
    assert done.stdout == emulate(sys.executable, "train.py", bare).stdout
    assert "the weights of someone/model are not here" in done.stderr


def test_an_id_of_which_nothing_is_here_but_harness_knows_it(emulate) -> None:
    done = emulate(code=KNOWN)
    assert done.stdout.replace("(", "").replace(")", "").split() == ["124439808", "2,", "9", "50256"]
    assert done.stderr.count("openai-community/gpt2 is not here and could not be fetched") == 1


def test_what_cannot_be_zeros_fails_as_it_would(emulate, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    theirs = write_config(tmp_path / "theirs", architectures=["NobodysModel"])
    assert "zeros cannot take their place" in emulate(sys.executable, "train.py", theirs, status=1).stderr
    unknown = emulate(sys.executable, "train.py", "someone/nothing", status=1)
    assert "OSError" in unknown.stderr
    assert "someone/nothing is not here. `harness checkpoint CONFIG --out DIR` makes a" in unknown.stderr


def test_a_transformers_without_what_is_replaced(emulate, tmp_path: Path) -> None:
    """4.37 has neither function (utils/hub.py, modeling_utils.py): it is imported all the same."""
    for name in ("__init__", "modeling_utils", "utils/__init__", "utils/hub"):
        file = tmp_path / f"transformers/{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.touch()
    (tmp_path / "train.py").write_text(
        "import torch, transformers.modeling_utils, transformers.utils.hub\n"
        "print(transformers.__file__, torch.ones(128, device='cuda').device)"
    )
    done = emulate(sys.executable, "train.py")
    assert done.stdout.splitlines()[-1] == f"{tmp_path}/transformers/__init__.py cuda:0"


@pytest.mark.parametrize("name", ["own-script", pytest.param("dpo-script", marks=pytest.mark.slow)])
def test_a_script_of_the_guide_takes_what_the_guide_says(name: str) -> None:
    """Llama as `from_pretrained` names it on the Hub, whose weights are not here."""
    assert ask(QUESTIONS[name], {}) == json.loads(RESULTS.read_bytes())["shown"][name]
