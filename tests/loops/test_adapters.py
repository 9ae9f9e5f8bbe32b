"""The adapters as docs/watch.md shows them, run with the real libraries on the CPU."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import harness
from harness.errors import InputError
from harness.step_profile.step_profile import StepProfile
from tests.support.places import ROOT

PAGE = (ROOT / "docs" / "watch.md").read_text(encoding="utf-8")
SNIPPETS = dict(re.findall(r"<!-- run: (\w+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))
LENGTH = 16


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(snippet: str, **given: Any) -> StepProfile:
    """Run a snippet of the guide; its run folder's profile."""
    exec(compile(SNIPPETS[snippet], f"docs/watch.md: {snippet}", "exec"), given)
    return the_profile()


def the_profile() -> StepProfile:
    (path,) = Path("profiles/runs").glob("*/profile.json")
    assert (path.parent / "snapshot.pickle").exists()
    return StepProfile.read(path)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0)
    )


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    known = {text: n for n, text in enumerate(["<pad>", "<eos>", *map(chr, range(32, 127))])}
    made = Tokenizer(models.BPE(vocab=known, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


COMMON = {
    "output_dir": "out",
    "max_steps": 6,
    "per_device_train_batch_size": 2,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
}


def weights_of(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def is_whole(profile: StepProfile, weights_bytes: int) -> None:
    """All phases were found and every byte of the peak is something."""
    assert profile.complete, profile.warnings
    assert profile.leak is None
    assert set(profile.phases) >= {"data", "forward", "backward", "optimizer_step"}
    assert profile.phases["forward"].time_s.n == 2  # the second step and the sixth
    at_peak = profile.memory.at_peak
    assert at_peak.total_bytes() == profile.memory.peak_allocated_bytes
    assert weights_bytes <= (at_peak.parameters_bytes or 0) < 1.01 * weights_bytes + 1024  # and buffers
    # AdamW: two moments, and a number of steps for each weight
    assert 2 * weights_bytes < (at_peak.optimizer_state_bytes or 0) < 2.01 * weights_bytes + 1024


def test_a_loop_of_ones_own() -> None:
    model = nn.Sequential(nn.Linear(LENGTH, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(torch.randn(6 * 4, LENGTH), batch_size=4)

    def train_one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    profile = run("loop", model=model, optimizer=optimizer, loader=loader, train_one_step=train_one_step)
    is_whole(profile, weights_of(model))
    assert len(profile.step.loss or []) == 6


def test_phases_that_are_named() -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with harness.watch(optimizer=optimizer, steps=(2, 3), out="here") as watch:
        for _ in range(4):
            with watch.phase("data"):
                x = torch.randn(8, 64)
            with watch.phase("forward"):
                loss = (x @ weight).square().mean()
            with watch.phase("backward"):
                loss.backward()
            with watch.phase("optimizer_step"):
                optimizer.step()
                optimizer.zero_grad()
            with watch.phase("evaluation"), torch.no_grad():
                held = [torch.ones(2**20)]
                del held
            watch.step()
    profile = StepProfile.read(Path("here/profile.json"))
    assert profile.complete
    assert profile.memory.at_peak.parameters_bytes == 4 * 64 * 64
    assert profile.memory.peak_phase == "backward"  # of the training: what lies between has its own
    assert profile.memory.peak_allocated_bytes == profile.phases["backward"].peak_allocated_bytes
    assert (profile.phases["evaluation"].peak_allocated_bytes or 0) >= 4 * 2**20
    assert (profile.phases["backward"].peak_allocated_bytes or 0) < 2**20


def test_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for steps in ((5, 3), 3, "3", (1.0, 2), (1, 2, 3), (0, 1), (True, 2), None):
        with pytest.raises(InputError, match=r"steps=.*: give the first and the last step to record"):
            harness.watch(steps=steps)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="out=5: give the path of a folder"):
        harness.watch(out=5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="DataParallel"):
        harness.watch(nn.DataParallel(nn.Linear(2, 2)))
    for model, optimizer in ((3, ()), (nn.Linear(2, 2), nn.Linear(2, 2)), ([nn.Linear(2, 2), "b"], ())):
        with pytest.raises(InputError, match=r"harness\.watch: a (int|Linear|str) is no torch\."):
            harness.watch(model, optimizer)  # type: ignore[arg-type]
    Path("taken").mkdir()
    Path("taken/profile.json").touch()
    with pytest.raises(InputError, match=r"already holds a profile\.json"):
        harness.watch(out="taken")
    with harness.watch(out="never") as watch, pytest.raises(InputError, match=r"phase .forwrad."):
        watch.phase("forwrad").__enter__()
    assert "watch.step() was not called" in capsys.readouterr().err
    assert not Path("never").exists()


def test_transformers_trainer() -> None:
    from transformers import TrainingArguments

    model = llama()
    rows = [{"input_ids": torch.arange(LENGTH), "labels": torch.arange(LENGTH)} for _ in range(16)]
    profile = run("trainer", model=model, arguments=TrainingArguments(**COMMON), rows=rows)
    is_whole(profile, weights_of(model))
    assert profile.step.tokens_per_s


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_trl(kind: str) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from datasets import Dataset

    if kind == "sft":
        rows = Dataset.from_list([{"prompt": f"a {n} ", "completion": "b " * (1 + n % 3)} for n in range(16)])
        config, trainer_class = trl.SFTConfig(**COMMON, max_length=LENGTH), trl.SFTTrainer
    else:
        pairs = [{"prompt": f"a {n} ", "chosen": "yes ", "rejected": "no "} for n in range(16)]
        rows, config, trainer_class = Dataset.from_list(pairs), trl.DPOConfig(**COMMON), trl.DPOTrainer
    model = llama()
    trainer_class(
        model,
        *([] if kind == "sft" else [llama()]),  # the reference model
        args=config,
        train_dataset=rows,
        processing_class=tokenizer(),
        callbacks=[harness.HarnessCallback()],
    ).train()
    profile = the_profile()
    assert profile.complete, profile.warnings
    assert "evaluation" not in profile.phases
    models = weights_of(model) * (2 if kind == "dpo" else 1)
    parameters = profile.memory.at_peak.parameters_bytes or 0
    assert models <= parameters < 1.01 * models + 2048
    assert profile.memory.at_peak.total_bytes() == profile.memory.peak_allocated_bytes


def test_lightning() -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(LENGTH, 256), nn.ReLU(), nn.Linear(256, 4))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    module = Module()
    data = TensorDataset(torch.randn(64, LENGTH), torch.randint(0, 4, (64,)))
    quiet = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger")
    settings = {"accelerator": "cpu", **dict.fromkeys(quiet, False)}
    profile = run("lightning", module=module, loader=DataLoader(data, batch_size=4), settings=settings)
    is_whole(profile, weights_of(module))
