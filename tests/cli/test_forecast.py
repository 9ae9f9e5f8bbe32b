"""A run that will take long on a CPU says so before it begins, and how much is left while it goes."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from harness.answers import Forecast, forecast_on_cpu
from harness.cli.running.measuring import in_words
from harness.cli.terminal.progress import RunProgress
from harness.hardware import find_hardware
from harness.napkin import predict
from harness.recipe import load_recipe
from harness.system import recipes_folder
from harness.units import duration


def test_a_large_recipe_is_announced_with_its_arithmetic(call, monkeypatch) -> None:
    def stop(*_: object, alive: Callable[[str], None], **__: object) -> None:
        alive("setup")
        alive("data of step 1")
        alive("forward of step 1")
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.measure.matmul_flops_per_s", lambda dtype: 50e9)
    monkeypatch.setattr("harness.answers.measured", stop)  # the run itself
    _, out, err = call("run", "llama-3.2-1b-bf16", "seq_len=4096", "--device", "cpu")
    # 6 FLOPs a weight and token, 1.24e9 weights, 4,096 tokens: 3e13 without attention, at 5e10 a second
    assert "9 steps of 38.1 TFLOP each, at the 50 GFLOP/s that a bf16 matrix product" in err
    assert err.count("at least 1.9 h on this CPU") == 1
    assert "harness simulate" in err
    assert "harness run smoke" in err
    assert "at least" not in out


def test_what_is_refused_is_not_announced(call, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("harness.measure.matmul_flops_per_s", lambda dtype: 50e9)
    config = tmp_path / "config.json"
    config.write_bytes((recipes_folder() / "models" / "llama-3.2-1b.json").read_bytes())
    for model, said in (
        (config, "is a config without weights"),
        (tmp_path, "gives none: Error no file named"),
    ):
        status, _, err = call(
            "run", "llama-3.2-1b-bf16", f"model={model}", "weights=pretrained", "--device", "cpu"
        )
        assert status == 2
        assert said in err
        assert "at least" not in err


def test_the_forecast_is_napkin_s_flops_at_the_speed_tried_here() -> None:
    recipe = load_recipe("llama-3.2-1b-bf16")[1]
    forecast = forecast_on_cpu(recipe)
    assert forecast is not None
    profile = predict(recipe, find_hardware("h100"))
    assert forecast.flops_per_step == sum(stats.flops or 0 for stats in profile.phases.values())
    assert forecast.steps == recipe.warmup_steps + recipe.steps + 2
    assert forecast.flops_per_s > 1e6
    assert forecast.run_s == pytest.approx(forecast.steps * forecast.flops_per_step / forecast.flops_per_s)


def test_a_small_recipe_and_an_unknown_model_are_not_announced() -> None:
    assert forecast_on_cpu(load_recipe("smoke")[1]) is None
    hubs = load_recipe("smoke", ["model=someone/never-heard-of"])[1]
    assert forecast_on_cpu(hubs) is None


def test_what_is_left_is_said_from_the_first_moment() -> None:
    text = io.StringIO()
    with RunProgress(Console(file=text, force_terminal=True, width=100), 9, step_s=800.0) as progress:
        pass
    assert "at least 2.0 h left" in text.getvalue()
    assert progress._left(3) == ""  # the first step tells nothing of the others


@pytest.mark.parametrize(
    ("seconds", "said"), [(9.6, "10 s"), (600, "10 min"), (7200, "2.0 h"), (864000, "10 days")]
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_words_name_the_cause() -> None:
    how_long, instead = in_words(Forecast(4, int(1e13), 1e11, "fp32"))
    assert how_long.startswith("This run takes at least 7 min on this CPU: 4 steps of 10.0 TFLOP")
    assert "simulate" in instead
