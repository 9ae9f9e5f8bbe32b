"""`harness simulate` and `harness validate`: the commands around the simulated answer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli_estimate import OUT_OF_MEMORY, Overrides, RecipeName, split_hardware
from harness.errors import InputError, printable

if TYPE_CHECKING:
    from rich.console import Console

    from harness.allocator_settings import Settings
    from harness.fit_exact import ExactFit
    from harness.hardware import Hardware
    from harness.recipe import Recipe
    from harness.simulated_memory import SimulatedMemory
    from harness.step_profile import StepProfile

BEYOND_TOLERANCE = 1

SIMULATE_EXAMPLES = """
Examples:

  harness simulate llama-3.1-8b-lora

  harness simulate llama-3.1-8b-lora seq_len=8192 hardware=a100-80gb --out here

  harness simulate mine --allocator expandable_segments:True --json > mine.json

  harness simulate mine hardware=h200 --trace-diff recorded/snapshot.pickle
"""
VALIDATE_EXAMPLES = """
Examples:

  harness validate llama-3.2-1b-bf16 hardware=h200

  harness validate profiles/h200/*.measured.json --tolerance 0.02

  harness validate smoke --measure
"""


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command(epilog=SIMULATE_EXAMPLES)(simulate)
    app.command(epilog=VALIDATE_EXAMPLES)(validate)


def simulate(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for profile.json, recipe.yaml and snapshot.pickle, which the memory_viz page opens.",
            show_default=False,
        ),
    ] = None,
    allocator: Annotated[
        str | None,
        typer.Option(
            help="Allocator settings, e.g. expandable_segments:True. Default: those of "
            "PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF.",
            show_default=False,
        ),
    ] = None,
    trace_diff: Annotated[
        Path | None,
        typer.Option(
            help="A recorded snapshot.pickle: show where its allocations differ from the simulated ones.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON on stdout, everything else on stderr.")
    ] = False,
) -> None:
    """Run the training step on shape-only tensors: memory to the byte and estimated time, without a GPU."""
    from harness.cli_streams import complain, quiet_libraries, stdout_kept_for_json
    from harness.console import Terminal
    from harness.garbage import collected_by_hand
    from harness.recipe_file import load_recipe
    from harness.run_folder import RunFolder
    from harness.safe_pickle import read_snapshot

    hardware, changes = split_hardware(overrides or [])
    name, loaded = load_recipe(recipe, changes)
    settings = allocator_settings(os.environ, allocator)
    folder = RunFolder(out, name, loaded) if out is not None else None
    recorded = read_snapshot(trace_diff) if trace_diff is not None else None
    with stdout_kept_for_json(as_json), collected_by_hand():
        quiet_libraries()
        from harness.oom import advise
        from harness.simulate import simulate as simulate_recipe

        profile, memory = simulate_recipe(loaded, hardware, settings, advise=advise)
        people = Terminal(stderr=as_json)
        document = _show(people, profile, memory, recorded)
        if folder is not None:
            folder.write_snapshot(memory.snapshot())
            folder.write_profile(profile)
            _say(people, f"run folder: {folder.path}")
    if as_json:
        print(document)
    if profile.oom is not None:
        from harness.oom import explain

        raise typer.Exit(complain(explain(profile), OUT_OF_MEMORY))


def validate(
    answers: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE|PROFILE.json|RUN... [KEY=VALUE]... [hardware=NAME]",
            help="Recipes (predicted here, and measured where profiles/ has a measurement), or profiles "
            "and run folders written by harness (what is missing is predicted).",
        ),
    ],
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Fail (exit status 1) when the peak allocated bytes of a prediction are off by more than "
            "this fraction, e.g. 0.02.",
            show_default=False,
        ),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure each recipe here and now.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON on stdout, everything else on stderr.")
    ] = False,
) -> None:
    """Put napkin, simulated and measured side by side, by component and phase, with what is unexplained."""
    from harness.cli_answers import complete, gather
    from harness.cli_streams import complain, quiet_libraries, stdout_kept_for_json
    from harness.console import Terminal
    from harness.validate import compare
    from harness.validate_table import print_comparison, print_summary

    if tolerance is not None and not tolerance >= 0:
        raise InputError(f"--tolerance {tolerance}: give a fraction of at least 0, e.g. 0.02.")
    comparisons = []
    with stdout_kept_for_json(as_json):
        quiet_libraries()
        people = Terminal(stderr=as_json)
        for case in gather(answers, measure=measure):
            complete(case)
            comparison = compare(case.profiles, case.name)
            comparisons.append(comparison)
            print_comparison(people, comparison)
            for note in case.notes:
                _say(people, f"note: {note}")
        if len(comparisons) > 1:
            print_summary(people, comparisons)
    if as_json:
        print(json.dumps({"comparisons": [comparison.as_json() for comparison in comparisons]}, indent=1))
    if tolerance is not None:
        beyond = [f"{c.name} {source}" for c in comparisons for source in c.beyond(tolerance)]
        if beyond:
            message = f"peak allocated is off by more than {100 * tolerance:g}%: {', '.join(beyond)}"
            raise typer.Exit(complain(message, BEYOND_TOLERANCE))


def fit_by_simulation(
    name: str, recipe: Recipe, hardware: Hardware, where: str, field: str, as_json: bool
) -> None:
    """What `harness fit --exact` does: search, say what is tried, print the largest value that fits."""
    from harness.cli_streams import quiet_libraries, stdout_kept_for_json
    from harness.console import Terminal

    if field not in ("micro_batch_size", "seq_len"):
        raise InputError(f"--field {field}: give micro_batch_size or seq_len.")
    log = Terminal(stderr=True)
    with stdout_kept_for_json(as_json):
        quiet_libraries()
        from harness.fit_exact import fit_exact

        settings = allocator_settings(os.environ)
        found = fit_exact(
            recipe,
            hardware,
            field,  # type: ignore[arg-type]
            settings=settings,
            told=lambda value, fits: _say(log, f"{field} {value}: {'fits' if fits else 'does not fit'}"),
        )
    if as_json:
        print(json.dumps({"recipe": name, "memory": where, **found.as_json()}, indent=1))
    else:
        print(printable("\n".join(_fit_lines(name, where, found))))
    if found.value is None:
        raise typer.Exit(OUT_OF_MEMORY)


def _fit_lines(name: str, where: str, found: ExactFit) -> Iterator[str]:
    from harness.console import in_gib

    if found.value is None or found.profile is None:
        yield f"{name} on {where}: no {found.field} fits"
    else:
        memory = found.profile.memory
        peak, reserved = in_gib(memory.peak_allocated_bytes), in_gib(memory.peak_reserved_bytes)
        yield f"{name} on {where}: the largest {found.field} is {found.value}"
        yield f"  it allocates {peak} at most and reserves {reserved}"
    if found.limit is not None:
        yield f"  {found.next_value} is impossible: {found.limit}"
    elif found.next_profile is not None and found.next_profile.oom is not None:
        oom = found.next_profile.oom
        asked = in_gib(oom.requested_bytes)
        yield f"  {found.next_value} runs out of memory in {oom.phase}, asking for {asked}"


def _show(
    people: Console, profile: StepProfile, memory: SimulatedMemory, recorded: dict[str, Any] | None
) -> str:
    """Print the profile, or its difference from a recorded snapshot; the same as JSON."""
    if recorded is None:
        from harness.console import print_profile
        from harness.console_peak import print_peak

        print_peak(people, profile)
        print_profile(people, profile)
        _say(people, f"time is a roofline; its rates: {profile.provenance['calibration']}")
        return profile.to_json()
    from harness.segment_diff import diff_segments
    from harness.trace_diff import busiest_device, diff_traces
    from harness.trace_diff_table import print_trace_diff

    simulated, device = memory.snapshot(), busiest_device(recorded)
    diff = diff_traces(recorded["device_traces"][device], simulated["device_traces"][0])
    segments = diff_segments(recorded, simulated, device)
    print_trace_diff(people, diff, segments)
    return json.dumps({**diff.as_json(), "segments": segments.as_json()}, indent=1)


def _say(people: Console, line: str) -> None:
    people.print(line, markup=False, highlight=False, soft_wrap=True)


def allocator_settings(environment: Mapping[str, str], text: str | None = None) -> Settings:
    """The settings in `text`, or else in the environment, for the installed torch. Raises InputError."""
    from harness.allocator_settings import parse_settings, settings_from_environment
    from harness.provenance import installed_version

    version = installed_version("torch") or "2.13"
    if text is not None:
        return parse_settings(text, version, origin="--allocator")
    return settings_from_environment(environment, version)
