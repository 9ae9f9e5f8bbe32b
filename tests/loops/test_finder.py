"""Steps and phases of loops of every kind, found by hooks alone, on the CPU: against what each loop does."""

import json
import pickle
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from harness.errors import InputError
from harness.loops.finder import LoopFinder
from harness.loops.memory_of_steps import Window
from harness.loops.process import until_the_end
from harness.loops.recorder import LoopRecorder
from harness.report.at_peak import by_code
from harness.report.history import history_of
from harness.run_folder.run_folder import RunFolder
from harness.snapshot.safe_read import read_snapshot
from harness.step_profile.step_profile import StepProfile
from harness.units import in_gib

WIDTH, ROWS = 32, 8


@dataclass
class Seen:
    """What a watched loop left."""

    profile: StepProfile
    lines: list[dict[str, Any]]
    finder: LoopFinder


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 4))


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


def watched(folder: Path, loop: Callable[[], Any], window: Window = Window(3, 5)) -> Seen:  # noqa: B008
    """Run `loop` as the main program of a process that `harness watch` started."""
    recorder = LoopRecorder(RunFolder(folder / "run", "watch", ["python", "train.py"]), ["train.py"], window)
    finder = LoopFinder(recorder)
    end = until_the_end(finder)
    try:
        loop()
    except Exception as error:  # as sys.excepthook sees it
        recorder.failed(error)
    finally:
        end()
    lines = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    return Seen(StepProfile.read(folder / "run" / "profile.json"), lines, finder)


def trained() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    net = model()
    return net, torch.optim.SGD(net.parameters())


def descend(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor | None = None) -> float:
    loss = net(batch() if x is None else x).square().mean()
    descend(loss, optimizer)
    return loss.item()


@torch.no_grad()
def generate(net: nn.Module) -> None:
    for _ in range(3):
        net(batch())


def phases_of(lines: list[dict[str, Any]]) -> set[str]:
    return {name.removesuffix("_s") for line in lines for name in line if name.endswith("_s")} - {"step"}


def test_a_plain_loop(tmp_path: Path) -> None:
    net, losses = model(), list[float]()
    optimizer = torch.optim.AdamW(net.parameters())
    data = DataLoader(TensorDataset(torch.randn(8 * ROWS, WIDTH), torch.randint(0, 4, (8 * ROWS,))), ROWS)
    criterion = nn.CrossEntropyLoss()

    began_us = time.time() * 1e6

    def loop() -> None:
        for n, (x, y) in enumerate(data, 1):
            loss = criterion(net(x), y)
            descend(loss, optimizer)
            losses.append(loss.item())
            if n % 4 == 0:
                net.eval()
                with torch.no_grad():
                    for held_out, _ in data:
                        net(held_out)
                torch.save(net.state_dict(), tmp_path / "weights.pt")
                net.train()

    seen = watched(tmp_path, loop)
    profile = seen.profile
    assert [line["loss"] for line in seen.lines] == losses
    assert [line["kind"] for line in seen.lines] == ["warmup", "timed", *["recorded"] * 3, *["timed"] * 3]
    assert profile.complete
    assert not profile.warnings
    assert profile.recipe is None
    assert profile.command == ["train.py"]
    # the evaluation and the saving after step 4 were recorded, those after step 8 timed
    expected = {"data", "forward", "backward", "optimizer_step", "between", "evaluation", "saving"}
    assert set(profile.phases) == expected == phases_of(seen.lines)
    assert {"evaluation_s", "saving_s"} <= set(seen.lines[-1])
    assert not {"evaluation_s", "saving_s"} & set(seen.lines[-2])
    weights = sum(4 * p.numel() for p in net.parameters())
    at_peak = profile.memory.at_peak
    assert at_peak.parameters_bytes == weights
    assert at_peak.optimizer_state_bytes == 2 * weights + 4 * len(list(net.parameters()))  # and a step each
    assert at_peak.total_bytes() == profile.memory.peak_allocated_bytes
    assert (at_peak.inputs_bytes or 0) >= 4 * ROWS * WIDTH
    events = read_snapshot(tmp_path / "run" / "snapshot.pickle")["device_traces"][0]
    times_us = [event["time_us"] for event in events]
    assert began_us <= times_us[0] < times_us[-1] <= time.time() * 1e6
    assert times_us == sorted(times_us)
    code = by_code(history_of(read_snapshot(tmp_path / "run" / "snapshot.pickle"), at_peak))
    held = dict(zip(code.labels, code.bytes, strict=True))
    assert held["parameters, there before the recording"] == weights
    assert {"phase=forward", "phase=evaluation"} <= {event["user_metadata"] for event in events}


def test_gradients_that_are_set_by_hand(tmp_path: Path) -> None:
    """torch.autograd.grad is backward; but what a loss differentiates for itself is of the forward pass."""

    def loop() -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(6):
            rows = batch().requires_grad_()
            out = net(rows)
            (slope,) = torch.autograd.grad(out.sum(), rows, create_graph=True)
            loss = out.square().mean() + slope.square().mean()
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            for weight, gradient in zip(net.parameters(), gradients, strict=True):
                weight.grad = gradient
            optimizer.step()
            optimizer.zero_grad()

    seen = watched(tmp_path, loop)
    assert seen.finder.seen["backward"] == 6
    assert {"forward", "backward", "optimizer_step"} <= seen.profile.phases.keys()


def test_a_tensor_that_is_pickled_is_not_saved(tmp_path: Path) -> None:
    """Pickle calls torch.save: what is sent to another process goes into no file."""
    net, optimizer = trained()

    def loop() -> None:
        for _ in range(6):
            step(net, optimizer)
            assert torch.equal(pickle.loads(pickle.dumps(net[0].weight)), net[0].weight)

    seen = watched(tmp_path, loop)
    assert set(seen.profile.phases) == {"forward", "backward", "optimizer_step", "between"}


def test_nothing_that_is_computed_changes(tmp_path: Path) -> None:
    def trained() -> list[float]:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(1)
        return [step(net, optimizer) for _ in range(7)]

    watched_losses: list[float] = []
    watched(tmp_path, lambda: watched_losses.extend(trained()))
    assert watched_losses == trained()


def test_everything_is_put_back(tmp_path: Path) -> None:
    from torch.nn.modules import module as modules

    before = torch.autograd.backward, torch.save, torch.amp.GradScaler.step
    net = model()
    watched(tmp_path, lambda: [step(net, torch.optim.SGD(net.parameters())) for _ in range(6)])
    assert (torch.autograd.backward, torch.save, torch.amp.GradScaler.step) == before
    assert not modules._global_forward_pre_hooks
    assert not net._forward_hooks


def test_micro_batches_are_one_step(tmp_path: Path) -> None:
    (net, optimizer), losses = trained(), list[float]()

    def loop() -> None:
        for _ in range(6):
            parts = [net(batch()).square().mean() / 3 for _ in range(1)]
            parts[0].backward()
            for _ in range(2):
                parts.append(net(batch()).square().mean() / 3)
                parts[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum(part.item() for part in parts))

    seen = watched(tmp_path, loop)
    assert [line["loss"] for line in seen.lines] == pytest.approx(losses)
    assert seen.finder.seen == {"forward": 18, "backward": 18, "optimizer step": 6}


def test_two_optimizers_that_step_together(tmp_path: Path) -> None:
    net = model()
    optimizers = [torch.optim.SGD(net[0].parameters()), torch.optim.AdamW(net[2].parameters())]

    def loop() -> None:
        for _ in range(6):
            net(batch()).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    assert len(watched(tmp_path, loop).lines) == 6


def test_two_models_that_take_turns(tmp_path: Path) -> None:
    """A step is of both, once both have been seen: the first two are of one each."""
    maker, judge = nn.Linear(WIDTH, WIDTH), model()
    of_judge, of_maker = (torch.optim.Adam(each.parameters()) for each in (judge, maker))

    def loop() -> None:
        for _ in range(8):
            with torch.no_grad():
                made = maker(batch())
            of_judge.zero_grad()
            (judge(batch()).mean() - judge(made).mean()).backward()
            of_judge.step()
            of_maker.zero_grad()
            judge(maker(batch())).mean().backward()
            of_maker.step()

    seen = watched(tmp_path, loop)
    assert len(seen.lines) == 2 + 7
    assert phases_of(seen.lines) == {"forward", "backward", "optimizer_step", "between"}
    weights = sum(4 * p.numel() for each in (maker, judge) for p in each.parameters())
    assert seen.profile.memory.at_peak.parameters_bytes == weights


def test_an_optimizer_that_no_longer_steps_ends_no_step(tmp_path: Path) -> None:
    net = model()
    first, last = torch.optim.SGD(net.parameters()), torch.optim.SGD(net.parameters())

    def loop() -> None:
        step(net, first)
        step(net, last)
        for _ in range(110):
            step(net, first)

    assert len(watched(tmp_path, loop).lines) == 3 + (110 - 101)


def test_a_reference_model_is_of_the_forward_pass(tmp_path: Path) -> None:
    net, reference = model(), model().eval()
    optimizer = torch.optim.SGD(net.parameters())

    def loop() -> None:
        for _ in range(6):
            x = batch()
            wanted = net(x)
            with torch.no_grad():
                given = reference(x)
            descend((wanted - given).square().mean(), optimizer)

    seen = watched(tmp_path, loop)
    assert "evaluation" not in seen.profile.phases
    assert seen.profile.memory.at_peak.parameters_bytes == 2 * sum(4 * p.numel() for p in net.parameters())


def test_generation_is_a_phase(tmp_path: Path) -> None:
    net, optimizer = trained()

    def loop() -> None:
        for _ in range(6):
            generate(net)
            step(net, optimizer)

    seen = watched(tmp_path, loop)
    assert len(seen.lines) == 6
    assert "generation" in seen.profile.phases
    assert "evaluation" not in seen.profile.phases


def test_what_an_evaluation_generates_is_part_of_it(tmp_path: Path) -> None:
    net, optimizer = trained()

    def loop() -> None:
        for number in range(8):
            step(net, optimizer)
            if number % 2:
                net.eval()
                with torch.no_grad():
                    net(batch())
                generate(net)
                torch.save(net.state_dict(), tmp_path / "weights.pt")
                net.train()

    lines = watched(tmp_path, loop, Window(1, 1)).lines
    assert [line["step"] for line in lines if "evaluation_s" in line] == [1, 3, 5, 7]
    assert [line["step"] for line in lines if "saving_s" in line] == [1, 3, 5, 7]
    assert not any("generation_s" in line for line in lines)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(tmp_path: Path, reentrant: bool) -> None:
    """What is computed again is of backward, and no module's call in it is a forward pass."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rest = nn.Linear(WIDTH, WIDTH), model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = checkpoint(self.rest, self.first(x), use_reentrant=reentrant)
            assert isinstance(result, torch.Tensor)
            return result

    net = Checkpointed()
    optimizer = torch.optim.SGD(net.parameters())
    seen = watched(tmp_path, lambda: [step(net, optimizer) for _ in range(6)])
    assert seen.finder.seen == {"forward": 6, "backward": 6, "optimizer step": 6}
    assert phases_of(seen.lines) == {"forward", "backward", "optimizer_step", "between"}


@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile(model)", "model.compile()"])
def test_a_compiled_model(tmp_path: Path, in_place: bool) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rest = model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rest(x) + 1

    torch._dynamo.reset()
    net = Wide()
    optimizer = torch.optim.SGD(net.parameters())
    run = net
    if in_place:
        net.compile(backend="eager", fullgraph=True)
    else:
        run = torch.compile(net, backend="eager")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        seen = watched(tmp_path, lambda: [step(run, optimizer) for _ in range(7)])
    assert len(seen.lines) == 7
    assert seen.profile.complete
    assert {"forward", "backward", "optimizer_step"} <= set(seen.profile.phases)
    assert not [w for w in warned if "global hooks" in str(w.message)]


def test_a_dispatch_mode_of_the_programs_own(tmp_path: Path) -> None:
    """One that begins within a phase and outlives it: the phase cannot end before it does, and nothing
    breaks."""
    from torch.utils.flop_counter import FlopCounterMode

    (net, optimizer), counted = trained(), set[int]()

    def loop() -> None:
        for _ in range(7):
            with FlopCounterMode(display=False) as counter:
                step(net, optimizer)
            counted.add(counter.get_total_flops())

    seen = watched(tmp_path, loop)
    assert len(seen.lines) == 7
    assert seen.profile.complete
    assert len(counted) == 1


def test_a_gradient_scaler_that_is_off(tmp_path: Path) -> None:
    """As programs make one that is on for fp16 alone; it has no scale then."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def loop() -> None:
        for _ in range(6):
            scaler.scale(net(batch()).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    profile = watched(tmp_path, loop).profile
    assert profile is not None
    assert profile.complete


def test_a_failure_of_the_watching_in_an_optimizers_hook_leaves_the_program_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch goes through the hooks as it calls them, and fails where one goes meanwhile."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight])
    recorder = LoopRecorder(RunFolder(tmp_path / "run", "watch", ["python", "train.py"]), ["train.py"])
    finder = LoopFinder(recorder)

    def fails(*_: Any) -> None:
        raise KeyError("of the recorder")

    monkeypatch.setattr(recorder, "enter", fails)
    another = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        weight.grad = torch.ones(3)
        optimizer.step()
    finally:
        finder.stop()
        another.remove()
    assert recorder.over


def test_a_gradient_scaler_that_leaves_steps_out(tmp_path: Path) -> None:
    """They are steps all the same; the loss is the one before it was scaled."""
    net, losses = model(), list[float]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)

    def loop() -> None:
        for _ in range(6):
            loss = 100 * net(batch()).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())

    seen = watched(tmp_path, loop)
    assert seen.finder.seen["optimizer step"] < 6
    assert [line["loss"] for line in seen.lines] == losses


def test_a_loss_that_is_nan(tmp_path: Path) -> None:
    net, optimizer = trained()
    seen = watched(
        tmp_path, lambda: [step(net, optimizer, batch() * (1 if n < 4 else float("nan"))) for n in range(6)]
    )
    wrong = seen.profile.not_finite
    assert wrong is not None
    assert (wrong.step, wrong.value, wrong.num_steps) == (4, "nan", 2)
    assert [line.get("not_finite") for line in seen.lines] == [None] * 4 + ["nan"] * 2


def test_memory_that_runs_out_in_a_recorded_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net, optimizer = trained()

    def loop() -> None:
        for n in range(6):
            hidden = net(batch())
            if n == 3:
                torch.empty(2**60)
            hidden.square().mean().backward()
            optimizer.step()

    seen = watched(tmp_path, loop)
    profile = seen.profile
    assert not profile.complete
    assert len(seen.lines) == 3
    assert profile.oom is not None
    assert (profile.oom.phase, profile.oom.requested_bytes) == ("forward", 4 * 2**60)
    assert {allocation.category for allocation in profile.oom.top} >= {"parameters", "inputs"}
    held = sum(one.size_bytes for one in profile.oom.top if one.category in ("inputs", "activations"))
    assert (profile.oom.batch_rows, profile.oom.batch_bytes) == (ROWS, held)
    said = capsys.readouterr().err
    assert "out of memory in forward" in said
    each = in_gib(held // ROWS)
    assert f"of the batch's {ROWS} rows held {in_gib(held)} by then, {each} a row." in said


def test_models_that_are_gone_at_the_end_are_named(tmp_path: Path) -> None:
    def loop() -> None:
        net, optimizer = trained()
        for _ in range(6):
            step(net, optimizer)

    about = watched(tmp_path, loop).profile.provenance
    assert (about["models"], about["optimizers"]) == (["Sequential"], ["SGD"])


def test_an_error_in_a_recorded_step(tmp_path: Path) -> None:
    net, optimizer = trained()

    def loop() -> None:
        for n in range(6):
            step(net, optimizer, batch() if n < 3 else torch.ones(1))

    profile = watched(tmp_path, loop).profile
    assert not profile.complete
    assert profile.oom is None
    assert profile.warnings[0] == "the program ended in step 4, in its phase forward: RuntimeError"
    assert profile.phases["backward"].peak_allocated_bytes


def test_an_error_in_the_first_step(tmp_path: Path) -> None:
    """No other steps would be recorded then."""
    net, optimizer = trained()
    with pytest.raises(FileNotFoundError):  # of a step that was not finished the log has no line
        watched(tmp_path, lambda: step(net, optimizer, torch.ones(1)))
    profile = StepProfile.read(tmp_path / "run" / "profile.json")
    assert profile.warnings == [
        "the program ended in step 1, in its phase forward: RuntimeError",
        "the loop ended after 0 steps, and steps 3-5 were to be recorded.",
    ]
    assert not profile.complete


@pytest.mark.parametrize("steps", [2, 3])
def test_a_loop_that_is_too_short(tmp_path: Path, steps: int) -> None:
    """One that ends by itself in the steps that are recorded is like the whole of them."""
    net, optimizer = trained()
    profile = watched(tmp_path, lambda: [step(net, optimizer) for _ in range(steps)]).profile
    assert profile.complete == (steps == 3)
    ended = f"the loop ended after {steps} steps, and steps 3-5 were to be recorded."
    assert profile.warnings == [f"{ended} Give others, e.g. --steps {steps}."]


@pytest.mark.parametrize("backward", [False, True])
def test_no_step_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str], backward: bool) -> None:
    def loop() -> None:
        for _ in range(4):
            loss = model()(batch()).mean()
            if backward:
                loss.backward()

    with pytest.raises(FileNotFoundError):
        watched(tmp_path, loop)
    said = capsys.readouterr().err
    assert f"4 x forward, {4 * backward} x backward, 0 x optimizer step. Looked for: calls of" in said
    assert not (tmp_path / "run").exists()


def test_data_parallel_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.DataParallel(model())
    optimizer = torch.optim.SGD(net.parameters())
    done = []
    with pytest.raises(FileNotFoundError):
        watched(tmp_path, lambda: done.append([step(net, optimizer) for _ in range(6)]))
    assert len(done[0]) == 6
    assert "the program goes on: torch.nn.DataParallel runs copies" in capsys.readouterr().err


def test_a_full_disk_ends_the_watching_and_not_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (net, optimizer), done = trained(), list[float]()

    def full(*_: Any) -> None:
        raise InputError("cannot write snapshot.pickle: No space left on device.")

    monkeypatch.setattr(RunFolder, "write_snapshot", full)
    seen = watched(tmp_path, lambda: done.extend(step(net, optimizer) for _ in range(8)))
    assert len(done) == 8
    assert len(seen.lines) == 5
    assert not seen.profile.complete
    said = capsys.readouterr().err
    assert said.count("watching ends here, the program goes on: cannot write snapshot.pickle") == 1


def calls_in_a_timed_step(folder: Path, num_layers: int, *, is_watched: bool) -> int:
    """Calls of Python functions in the last step of a plain loop."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(num_layers)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, counted = torch.randn(2, 4), [0]

    def count(frame: Any, event: str, argument: Any) -> None:
        counted[0] += event == "call"

    def loop() -> None:
        for n in range(8):
            sys.setprofile(count if n == 6 else None)
            descend(net(x).sum(), optimizer)
        sys.setprofile(None)

    if is_watched:
        watched(folder, loop, Window(2, 3))
    else:
        loop()
    return counted[0]


def test_what_watching_adds_to_a_timed_step_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Counted in calls of Python functions, which a step of a small model makes thousands of."""
    added = []
    for num_layers in (2, 20):
        bare = calls_in_a_timed_step(tmp_path, num_layers, is_watched=False)
        folder = tmp_path / str(num_layers)
        added.append(calls_in_a_timed_step(folder, num_layers, is_watched=True) - bare)
    assert added[0] == added[1]
    assert 0 < added[0] <= 150


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_modules_that_are_called_in_backward_begin_no_step(tmp_path: Path, use_reentrant: bool) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def loop() -> None:
        for _ in range(6):
            out: Any = checkpoint(net, batch().requires_grad_(), use_reentrant=use_reentrant)
            out.square().mean().backward()
            optimizer.step()

    seen = watched(tmp_path, loop)
    assert seen.finder.seen == {"forward": 6, "backward": 6, "optimizer step": 6}
    assert len(seen.lines) == 6


def test_what_every_step_leaves_behind_is_a_leak(tmp_path: Path) -> None:
    """A list of losses that still have their graphs, of batches that differ in length."""
    net, losses = model(), list[torch.Tensor]()
    optimizer = torch.optim.SGD(net.parameters())

    def loop() -> None:
        for rows in (9, 3, 7, 5, 8, 6):
            loss = net(torch.randn(100 * rows, WIDTH)).square().mean()
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)

    profile = watched(tmp_path, loop).profile
    assert profile.leak is not None
    # of a step whose graph stays: its rows, what the ReLU made of the first layer's output, and the output
    kept = 4 * (WIDTH + 2 * WIDTH + 4)
    assert profile.leak.num_steps == 2
    assert profile.leak.bytes_per_step == pytest.approx(100 * (7 + 5) / 2 * kept, rel=0.001)
    assert profile.leak.largest is not None
    assert any("test_finder.py" in line for line in profile.leak.largest.stack)
    assert [words for words in profile.warnings if words.startswith("memory leak")]


@pytest.mark.parametrize("rows", [(2, 4, 6, 8, 10, 12), (12, 10, 8, 6, 4, 2), (3, 9, 1, 7, 2, 8)])
def test_longer_batches_are_no_leak(tmp_path: Path, rows: tuple[int, ...]) -> None:
    net, values = model(), list[torch.Tensor]()
    optimizer = torch.optim.AdamW(net.parameters())

    def loop() -> None:
        for count in rows:
            values.append(torch.tensor(step(net, optimizer, torch.randn(100 * count, WIDTH))))

    assert watched(tmp_path, loop).profile.leak is None
