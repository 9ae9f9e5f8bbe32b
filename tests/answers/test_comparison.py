"""The answers side by side: ratios, what is unexplained and where, and what cannot be compared."""

import json
from typing import Any

import pytest
from rich.console import Console

from harness.answers.comparison import Comparison, compare, different_fields, unexplained_lines
from harness.cli.terminal.comparison import print_comparison, print_summary
from harness.errors import InputError
from harness.recipe.recipe import Recipe
from harness.step_profile import (
    HardwareSummary,
    MemoryBreakdown,
    MemoryStats,
    OutOfMemoryReport,
    PhaseStats,
    StepProfile,
    StepStats,
    TimeStats,
)

MiB = 2**20


def profile(source: Any, peak_mib: int | None = 1000, **changes: Any) -> StepProfile:
    """A profile whose peak is in backward: 600 MiB parameters, 300 activations, the rest temporaries."""
    rest = None if peak_mib is None else (peak_mib - 900) * MiB
    at_peak = MemoryBreakdown(parameters_bytes=600 * MiB, activations_bytes=300 * MiB, temporaries_bytes=rest)
    peak = None if peak_mib is None else peak_mib * MiB
    fields: dict[str, Any] = {
        "recipe": {"model": "m", "seq_len": 16, "steps": 5},
        "hardware": HardwareSummary(name="h100", kind="cuda" if source == "measured" else "table"),
        "memory": MemoryStats(
            kind="closed_form", peak_allocated_bytes=peak, peak_phase="backward", at_peak=at_peak
        ),
        "phases": {
            "forward": PhaseStats(peak_allocated_bytes=800 * MiB, time_s=TimeStats(median=0.1)),
            "backward": PhaseStats(peak_allocated_bytes=peak, time_s=TimeStats(median=0.2)),
        },
        "step": StepStats(time_s=TimeStats(median=0.3)),
    }
    return StepProfile(source=source, **(fields | changes))


def row(comparison: Comparison, place: str, name: str) -> Any:
    (found,) = [row for row in comparison.rows if (row.place, row.name) == (place, name)]
    return found


def text_of(comparison: Comparison) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        print_comparison(console, comparison)
    return capture.get()


def test_ratios_and_unexplained_bytes_are_against_the_measured_profile() -> None:
    comparison = compare([profile("measured", 1000), profile("simulated", 990), profile("napkin", 1100)])
    peak = comparison.peak()
    assert (comparison.reference, comparison.predictions) == ("measured", ("napkin", "simulated"))
    assert peak.ratio("simulated") == pytest.approx(0.99)
    assert peak.ratio("napkin") == pytest.approx(1.1)
    assert peak.unexplained("simulated") == 10 * MiB
    assert peak.unexplained("napkin") == -100 * MiB
    # the only category and the only phase that differ
    assert comparison.unexplained_by_category("simulated") == {"temporaries": 10 * MiB}
    assert comparison.unexplained_by_phase("simulated") == {"backward": 10 * MiB}


def test_without_a_measured_profile_the_simulated_one_is_the_reference() -> None:
    comparison = compare([profile("napkin", 950), profile("simulated", 1000)])
    assert (comparison.reference, comparison.predictions) == ("simulated", ("napkin",))
    assert comparison.peak().ratio("napkin") == pytest.approx(0.95)


@pytest.mark.parametrize(("peak_mib", "is_beyond"), [(980, False), (1020, False), (979, True), (1021, True)])
def test_tolerance_is_a_fraction_of_the_reference_both_ways(peak_mib: int, is_beyond: bool) -> None:
    comparison = compare([profile("measured", 1000), profile("simulated", peak_mib)])
    assert comparison.beyond(0.02) == (["simulated"] if is_beyond else [])


def test_an_unknown_value_is_a_dash_and_never_a_ratio() -> None:
    comparison = compare([profile("measured"), profile("napkin", peak_mib=None)])
    peak = comparison.peak()
    assert peak.values == {"measured": 1000 * MiB, "napkin": None}
    assert peak.ratio("napkin") is None
    assert peak.unexplained("napkin") is None
    assert comparison.beyond(0.5) == ["napkin"]  # a prediction without a peak is not within anything
    assert next(iter(unexplained_lines(comparison))).startswith("unexplained, measured - napkin: unknown")


def test_out_of_memory_agrees_only_with_out_of_memory() -> None:
    oom = {"oom": OutOfMemoryReport(phase="forward"), "complete": False}
    both = compare([profile("measured", **oom), profile("simulated", **oom)])
    assert both.peak().values == {"measured": None, "simulated": None}
    assert both.beyond(0.02) == []
    assert compare([profile("measured"), profile("simulated", **oom)]).beyond(0.02) == ["simulated"]
    assert compare([profile("measured", **oom), profile("simulated")]).beyond(0.02) == ["simulated"]


def test_rows_that_nobody_knows_are_left_out() -> None:
    names = {(r.place, r.name) for r in compare([profile("measured"), profile("napkin")]).rows}
    assert ("total", "process") not in names
    assert ("at peak", "gradients") not in names
    assert ("at peak", "activations") in names


def test_times_of_a_cpu_are_not_held_against_those_of_a_gpu() -> None:
    cpu = profile("measured", hardware=HardwareSummary(name="some CPU", kind="cpu"))
    comparison = compare([cpu, profile("simulated", 990)])
    time = row(comparison, "step", "time")
    assert time.values == {"measured": 0.3, "simulated": 0.3}
    assert time.ratio("simulated") is None
    assert comparison.peak().ratio("simulated") == pytest.approx(0.99)  # memory is compared, and labelled
    assert any(note.startswith("measured on a CPU") for note in comparison.notes)


def test_notes_say_what_the_numbers_hide() -> None:
    oom = OutOfMemoryReport(phase="forward")
    versions = {
        "versions": {"torch": "2.13.0+cpu", "peft": "0.21.2"},
        "attention_kernels": ["efficient", "flash"],
    }
    other_versions = {"versions": {"torch": "2.12.0"}, "attention_kernels": ["math"]}
    measured = profile("measured", provenance=other_versions, oom=oom, complete=False)
    simulated = profile("simulated", provenance=versions)
    simulated.memory.peak_phase = "optimizer_step"
    notes = compare([measured, simulated]).notes
    assert [note.split(":")[0] for note in notes] == [
        "measured",
        "the peaks lie in different phases, so their categories differ",
        "different versions",
        "different attention kernels",
    ]
    assert "2.13.0+cpu simulated, 2.12.0 measured" in notes[2]

    # another build of the same release, and kernels by the names that PyTorch gives their operators
    operators = [f"aten._scaled_dot_product_{name}_attention" for name in ("efficient", "flash")]
    same = {"versions": {"torch": "2.13.0+cu130", "peft": "0.21.2"}, "attention_kernels": operators}
    assert (
        compare([profile("measured", provenance=same), profile("simulated", provenance=versions)]).notes == ()
    )


def test_fields_that_change_no_byte_may_differ() -> None:
    short = {"model": "m", "seq_len": 16, "steps": 1, "learning_rate": 1.0}
    assert compare([profile("measured"), profile("simulated", recipe=short)]).peak().ratio("simulated") == 1


@pytest.mark.parametrize(
    ("profiles", "words"),
    [
        ([profile("measured"), profile("measured")], "two measured profiles"),
        ([profile("measured")], "only a measured profile"),
        ([profile("napkin")], "only a napkin profile"),
        (
            [profile("measured"), profile("simulated", recipe={"model": "m", "seq_len": 32})],
            "seq_len is 16 and 32",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(profiles: list[StepProfile], words: str) -> None:
    with pytest.raises(InputError, match=words):
        compare(profiles, "mine")


def test_the_table_shows_sizes_ratios_and_the_place_of_what_is_missing() -> None:
    comparison = compare([profile("measured", 1536), profile("simulated", 1024)], "mine")
    text = text_of(comparison)
    assert "mine on h100; reference: measured" in text
    assert "1.50 GiB" in text
    assert "0.6667" in text  # 1024 / 1536
    assert "unexplained, measured - simulated: +0.50 GiB of the peak" in text
    assert "by category: temporaries +0.50 GiB; by phase: backward +0.50 GiB" in text
    console = Console(width=100)
    with console.capture() as capture:
        print_summary(console, [comparison])
    assert capture.get() == "mine on h100: measured 1.50 GiB; simulated 0.6667\n"


def test_json_is_plain_and_holds_every_row() -> None:
    comparison = compare([profile("measured", 1000), profile("simulated", 990)], "mine")
    document = json.loads(json.dumps(comparison.as_json()))
    first = document["rows"][0]
    assert (first["place"], first["name"], first["measured"]) == ("total", "peak allocated", 1000 * MiB)
    assert first["napkin"] is None
    assert first["unexplained"] == {"simulated": 10 * MiB}
    assert len(document["rows"]) == len(comparison.rows)


def test_a_profile_older_than_a_field_has_its_default():
    old = Recipe(model="any").model_dump(mode="json")
    new = {**old, "seq_len": old["seq_len"] + 1}
    for name in ("offload", "checkpoint_every"):
        del old[name]
    assert different_fields(old, new) == {"seq_len": (old["seq_len"], new["seq_len"])}
    assert different_fields(old, {**new, "seq_len": old["seq_len"], "offload": ["optimizer"]}) == {
        "offload": ([], ["optimizer"])
    }
