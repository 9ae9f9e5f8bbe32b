"""What people read: every number where it belongs, in 80 columns, with a unit."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from harness.cli.terminal.profile_tables import print_profile
from harness.cli.terminal.progress import RunProgress
from harness.cli.terminal.terminal import Terminal
from harness.step_profile import (
    WITHOUT_HOST,
    Allocation,
    HardwareSummary,
    LeakReport,
    MemoryBreakdown,
    MemoryStats,
    NotFiniteReport,
    OutOfMemoryReport,
    PhaseStats,
    StepProfile,
    StepStats,
    TimeStats,
)
from harness.units import in_gib, in_ms
from tests.support.commands import Call
from tests.support.places import ROOT
from tests.support.tiny import tiny

GIB = 2**30


def profile(**changes) -> StepProfile:
    """A GPU's profile with numbers as wide as they get."""
    time_s = TimeStats(median=12.3456, p10=11.5, p90=13.25, n=5)
    phase = PhaseStats(
        time_s=time_s,
        peak_allocated_bytes=123 * GIB,
        peak_reserved_bytes=130 * GIB,
        allocated_at_end_bytes=100 * GIB,
    )
    fields = {
        "source": "measured",
        "recipe": {},
        "hardware": HardwareSummary(name="NVIDIA H200", kind="cuda"),
        "memory": MemoryStats(
            kind="cuda_allocator",
            peak_allocated_bytes=123 * GIB,
            peak_reserved_bytes=130 * GIB,
            peak_phase="optimizer_step",
            at_peak=MemoryBreakdown(parameters_bytes=100 * GIB, activations_bytes=23 * GIB, other_bytes=0),
            setup_peak_allocated_bytes=2**20,
        ),
        "phases": dict.fromkeys(("data", "forward", "backward", "optimizer_step"), phase),
        "step": StepStats(time_s=time_s, tokens_per_s=12345.6, mfu=0.5, bound="compute", loss=[2.0, 1.5]),
    }
    return StepProfile(**{**fields, **changes})


def printed(shown: StepProfile, width: int = 80) -> list[str]:
    text = io.StringIO()
    print_profile(Console(file=text, width=width), shown)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def row(lines: list[str], name: str) -> list[str]:
    return next(line.split() for line in lines if line.split()[:1] == [name])


@pytest.mark.parametrize("not_finite", [None, NotFiniteReport(step=0, phase="forward", value="nan")])
def test_a_loss_that_nobody_knows_is_not_said_to_be_infinite(not_finite):
    step = StepStats(time_s=TimeStats(), loss=[None, 1.5])
    said = "not known" if not_finite is None else "not finite"
    assert f"loss {said} -> 1.5000 over 2 steps" in printed(profile(step=step, not_finite=not_finite))


def test_tokens_of_the_devices_time_alone_are_said_to_be_so():
    """harness watch prints them below those of a virtual GPU, which waits for its host."""
    said = "12,346 tokens/s, MFU 50.0%"
    assert f"{said} if the device never waits for the host" in printed(
        profile(provenance={"times": f"estimated, {WITHOUT_HOST}"})
    )
    assert said in printed(profile(provenance={"times": "estimated"}))


def test_a_wide_profile_fits_in_80_columns_and_loses_nothing():
    lines = printed(profile())
    assert not any("…" in line for line in lines)
    tables = [line for line in lines if not line.startswith(("device", "setup"))]
    assert max(map(len, tables)) <= 80
    numbers = "12,346 11,500 - 13,250 25% 123.00 GiB 130.00 GiB 100.00 GiB"
    assert row(lines, "optimizer_step") == ["optimizer_step", *numbers.split()]
    step = "step 12,346 11,500 - 13,250 123.00 GiB 130.00 GiB"
    assert row(lines, "step") == step.split(" ")
    assert row(lines, "parameters") == ["parameters", "100.00", "GiB", "81.3%"]
    assert row(lines, "peak") == ["peak", "123.00", "GiB"]
    assert "memory at the peak, in optimizer_step" in lines
    assert "12,346 tokens/s, MFU 50.0%" in lines
    assert "the step is compute bound" in lines
    assert "loss 2.0000 -> 1.5000 over 2 steps" in lines
    assert not any(line.split()[:1] == ["other"] for line in lines)  # nothing is there


def test_a_narrow_terminal_cuts_no_number():
    narrow, wide = printed(profile(), width=40), printed(profile(), width=80)
    words = [{word for word in " ".join(lines).split() if "─" not in word} for lines in (narrow, wide)]
    assert words[0] == words[1]
    tables = [line for line in narrow if not line.startswith(("device", "setup", "measured", "memory"))]
    assert max(map(len, tables)) <= 40


def test_what_is_unknown_is_not_shown_as_zero():
    phases = {"forward": PhaseStats(peak_allocated_bytes=GIB)}
    memory = MemoryStats(kind="live_tensors", peak_allocated_bytes=GIB)
    lines = printed(profile(phases=phases, memory=memory, step=StepStats()))
    assert row(lines, "phase") == ["phase", "peak"]
    assert row(lines, "forward") == ["forward", "1.00", "GiB"]
    assert not any("reserved" in line or "tokens/s" in line or "category" in line for line in lines)


def test_a_run_that_ended_before_any_step_prints_no_empty_table():
    phases = dict.fromkeys(("data", "forward"), PhaseStats())
    memory = MemoryStats(kind="live_tensors", setup_peak_allocated_bytes=GIB)
    lines = printed(profile(phases=phases, memory=memory, step=StepStats()))
    assert not any("phase" in line for line in lines)
    assert "setup peak 1.00 GiB" in lines


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (-102, "-102 B"),
        (103, "0.1 KiB"),
        (32768, "32.0 KiB"),
        (2**20, "1.0 MiB"),
        (GIB // 4, "0.25 GiB"),
        (1500 * GIB, "1,500.00 GiB"),
    ],
)
def test_bytes(size, text):
    assert in_gib(size) == text


def test_milliseconds():
    assert (in_ms(None), in_ms(1.5), in_ms(0.0001)) == ("-", "1,500 ms", "0.1 ms")


def stepped(console: Console) -> None:
    with RunProgress(console, 2) as progress:
        progress.step(0, 2, "warmup", 1.5, None, None)
        progress.step(1, 2, "timed", 1.25, 1234.0, GIB)


def test_progress_elsewhere_is_a_plain_line_a_step():
    text = io.StringIO()
    stepped(Console(file=text))
    assert text.getvalue() == (
        "step 1/2 warmup  loss 1.5000\nstep 2/2 timed  loss 1.2500  1,234 tokens/s  peak 1.00 GiB\n"
    )


def test_progress_on_a_terminal_is_a_bar_that_goes_away():
    text = io.StringIO()
    stepped(Console(file=text, force_terminal=True, width=120))
    shown = text.getvalue()
    assert "loss 1.2500  1,234 tokens/s  peak 1.00 GiB" in shown
    assert "2/2" in shown
    assert shown.rstrip().endswith("\x1b[2K")  # the last thing is to erase the line


def test_progress_fits_a_narrow_terminal():
    text = io.StringIO()
    stepped(Console(file=text, force_terminal=True, width=80))
    assert "peak 1.00 GiB" in text.getvalue()


HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\x9b31m[red]x[/red] :warning: \u202etxt"
SPELLED = "\\x1b[2J\\x1b]0;owned\\x07\\r\\x9b31m[red]x[/red] :warning: \\u202etxt"


def test_what_a_file_says_is_shown_and_not_obeyed() -> None:
    """In a line, a table's cell, its title and its headings; colours of our own are still there."""
    text = io.StringIO()
    terminal = Terminal(file=text, width=200, force_terminal=True, color_system="standard")
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE)
    terminal.print(HOSTILE, style="red")
    terminal.print(table)
    shown = text.getvalue()
    assert shown.count(SPELLED) == 4
    assert "\x1b[31m" + SPELLED in shown
    assert "owned\x07" not in shown


def hostile_profile(folder: Path, source: str = "measured") -> Path:
    """A profile in which every place for free text holds HOSTILE."""
    allocation = Allocation(
        size_bytes=2**20, category=HOSTILE, phase=HOSTILE, module=HOSTILE, stack=[HOSTILE]
    )
    shown = profile(
        source=source,
        recipe=tiny().model_dump(mode="json"),
        hardware=HardwareSummary(name=HOSTILE, kind="cpu"),
        memory=MemoryStats(
            kind="live_tensors",
            peak_allocated_bytes=5 * GIB,
            peak_phase=HOSTILE,
            at_peak=MemoryBreakdown(parameters_bytes=5 * GIB),
            at_peak_by_module={HOSTILE: 5 * GIB},
        ),
        provenance={HOSTILE: HOSTILE, "versions": {"torch": HOSTILE}},
        top=[allocation],
        oom=OutOfMemoryReport(phase=HOSTILE, top=[allocation], advice=[HOSTILE]),
        leak=LeakReport(bytes_per_step=1, num_steps=3, by_category={HOSTILE: 1}, largest=allocation),
        not_finite=NotFiniteReport(step=1, phase=HOSTILE, value=HOSTILE, checkpoint=HOSTILE),
        warnings=[HOSTILE],
    )
    path = folder / f"{source}.json"
    path.write_text(shown.to_json())
    return path


@pytest.mark.parametrize(
    "command", [["validate"], ["report", "--markdown"], ["report", "--csv"], ["report"]], ids=" ".join
)
def test_no_command_passes_on_an_escape(command, tmp_path, call: Call) -> None:
    paths = [hostile_profile(tmp_path, source) for source in ("measured", "simulated", "napkin")]
    status, *shown = call(*command, *paths)
    assert status == 0
    printed = "".join(shown)
    assert printed.replace("\n", "").isprintable()
    assert command == ["report"] or "x1b" in printed


def test_every_console_of_the_commands_is_a_terminal() -> None:
    """rich's own would obey markup, and pass escape sequences on."""
    sources = sorted((ROOT / "harness").rglob("*.py"))
    assert len(sources) > 100
    made = [path.name for path in sources if re.search(r"\bConsole\(", path.read_text("utf-8"))]
    assert made == []


def test_a_line_says_what_the_time_consists_of():
    """The sum over phases; what is less than a fiftieth is the rest."""
    phases = {
        "forward": PhaseStats(kernels_s={"product": 0.5, "dequantize": 0.09, "embedding": 0.01}),
        "backward": PhaseStats(kernels_s={"product": 0.3, "copy": 0.1}),
    }
    time = TimeStats(median=1.0, p10=0.8, p90=1.25)
    lines = " ".join(printed(profile(phases=phases, step=StepStats(time_s=time, tokens_per_s=1000.0))))
    said = "time: products 80%, copies 10%, dequantization 9%, rest 1%; 800 to 1,250 tokens/s four"
    assert said in lines
    assert "time: " not in " ".join(printed(profile()))
