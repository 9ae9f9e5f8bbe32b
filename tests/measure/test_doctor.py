"""The doctor tries every toggle, says what works, and gives the reason for what does not."""

import io
import json
import subprocess
import sys
import warnings

import pytest
import torch
from rich.console import Console

from harness.cli.terminal.doctor import print_findings
from harness.errors import MissingDependency
from harness.measure import doctor
from harness.measure.doctor import examine, toggle_recipes
from harness.recipe import OF_RANKS, Recipe

NOTHING_TO_COMPILE = [sys.executable, "-c", "pass"]


def process(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def by_name(findings: dict) -> dict[str, dict]:
    return {finding["name"]: finding for finding in findings["toggles"] + findings["checks"]}


@pytest.fixture(scope="module")
def findings():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "_start_compiling", lambda: process(*NOTHING_TO_COMPILE))
        return examine()


def test_every_value_of_every_toggle_is_tried():
    """The values as the JSON Schema has them, which is not what the doctor reads."""
    not_tried = {"train_vision", "weights", "trust_remote_code", "lora_targets", *OF_RANKS}
    expected = set()
    for name, schema in Recipe.model_json_schema()["properties"].items():
        if name in not_tried:
            continue
        if schema.get("type") == "boolean":
            expected.add(f"{name}: true")
        values = schema.get("enum") or schema.get("items", {}).get("enum") or []
        expected |= {f"{name}: {value}" for value in values}
    tried = [name for name, _ in toggle_recipes()]
    assert set(tried) == expected - {"compile: true"}
    assert len(tried) == len(set(tried)) > 30


@pytest.mark.parametrize(("name", "fields"), list(toggle_recipes()))
def test_a_tried_recipe_has_what_it_is_tried_for(name, fields):
    field, value = name.split(": ")
    given = getattr(Recipe.model_validate(fields), field)
    assert value in (str(given).lower(), *(given if isinstance(given, tuple) else [given]))


def test_findings_on_a_cpu(findings):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    found = by_name(findings)
    for name in ("precision: fp32", "precision: fp16-mixed", "quantization: nf4", "adapter: lora"):
        assert found[name] == {**found[name], "works": True, "reason": None}
    for name, reason in (
        ("attention: flash_attention_2", "GPU"),
        ("optimizer: paged_adamw", "Paged"),
        # a build for CUDA looks for the driver first
        ("host memory: pinned", "driver" if torch.version.cuda else "pin"),
        ("memory history: CUDA", "driver" if torch.version.cuda else "CUDA"),
        ("sdpa kernel: cuDNN", "backend"),
    ):
        assert not found[name]["works"]
        assert reason in found[name]["reason"]
    assert findings["gpus"] == []
    assert findings["machine"]["no_gpu_because"]
    assert torch.__version__.startswith(findings["packages"]["torch"])  # 2.11.0 of 2.11.0+cu130
    assert json.loads(json.dumps(findings)) == findings


def test_a_toggle_that_fails_says_why(monkeypatch, findings):
    def fail(recipe, *_):
        if recipe.quantization == "fp4":
            raise MissingDependency("bitsandbytes", None, "quantization: fp4")
        if recipe.adapter == "ia3":
            raise RuntimeError("first line\nsecond line")
        if recipe.optimizer == "sgd":
            warnings.warn("this is slower", stacklevel=1)
        if recipe.optimizer == "adafactor":
            warnings.warn("there is none here: falling back to another", stacklevel=1)

    monkeypatch.setattr(doctor, "_one_step", fail)
    found = {
        finding["name"]: finding for finding in doctor._try_toggles(torch.device("cpu"), lambda name: None)
    }
    assert "pip install bitsandbytes" in found["quantization: fp4"]["reason"]
    assert found["adapter: ia3"]["reason"] == "RuntimeError: first line"
    assert "falling back to another" in found["optimizer: adafactor"]["reason"]
    failing = [name for name in found if not found[name]["works"]]
    assert failing == ["quantization: fp4", "adapter: ia3", "optimizer: adafactor"]


def test_a_step_without_a_finite_loss_does_not_work(monkeypatch):
    monkeypatch.setattr(doctor, "set_up", lambda *_: (None, None))
    step = type("Step", (), {"loss": torch.tensor(float("nan"))})
    monkeypatch.setattr(doctor, "run_steps", lambda *_: iter([step]))
    with pytest.raises(ArithmeticError, match="nan"):
        doctor._one_step(Recipe(model="any"), torch.device("cpu"))


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("pass", None),
        ("import sys; sys.exit('no compiler')", "no compiler"),
        ("import time; time.sleep(60)", "more than"),
    ],
)
def test_compiling_fine_failing_and_hanging(code, error, monkeypatch):
    monkeypatch.setattr(doctor, "COMPILE_LIMIT_S", 1 if "sleep" in code else 60)
    running = process(sys.executable, "-c", code)
    if error is None:
        doctor._finish_compiling(running)
    else:
        with pytest.raises((RuntimeError, TimeoutError), match=error):
            doctor._finish_compiling(running)
    assert running.returncode is not None


def test_what_is_printed(findings):
    text = io.StringIO()
    print_findings(Console(file=text, width=200), findings)
    lines = text.getvalue().splitlines()
    working, failing = (
        lines.index(next(line for line in lines if line.startswith(title)))
        for title in ("works here", "does not work here")
    )
    assert any(
        line.split() == ["adapter", "none,", "lora,", "ia3,", "peft"] for line in lines[working:failing]
    )
    flash = next(line for line in lines[failing:] if line.startswith("attention: flash_attention_2"))
    assert "GPU" in flash
    assert any("harness[flash-attn]" in line for line in lines) or findings["packages"]["flash-attn"]
