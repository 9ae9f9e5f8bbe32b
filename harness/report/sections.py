"""The section of a page about one run: data for the page's scripts, tables and words for its template."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.report.answers import Answers, answers_about
from harness.report.at_peak import MOST_KINDS, Kind, by_code, by_module, groups_table, kinds, kinds_table
from harness.report.columns import history_columns
from harness.report.first_words import first_words
from harness.report.history import History
from harness.report.phase_roofline import roofline_of
from harness.report.profile_tables import profile_tables
from harness.report.run import ReportRun
from harness.report.table import Cell, Table
from harness.snapshot import Piece, Segment, free_stretches, pieces_in_use
from harness.step_profile import PHASES_BETWEEN_STEPS, PhaseStats, StepProfile, explain_oom
from harness.units import in_gib, in_ms

MOST_SEGMENTS = 16
"""The most segments that are drawn: those with the most free memory in them."""
MOST_PIECES = 400
"""The most allocated stretches of one segment that are drawn."""


def segments_with_most_free(used: Sequence[tuple[Segment, list[Piece]]]) -> list[dict[str, Any]]:
    """The segments that are drawn: those with free memory in them, equal ones once with their `count`, those
    with the most free memory first. Sizes and places are in bytes, and `free` is that of a single segment.
    `used` is what `pieces_in_use` returns.
    """
    counts: Counter[tuple[str, int, tuple[Piece, ...]]] = Counter(
        (segment.kind, segment.size_bytes, tuple(pieces)) for segment, pieces in used
    )
    found: list[dict[str, Any]] = [
        {
            "kind": kind,
            "size": size,
            "count": count,
            "free": size - sum(length for _, length in pieces),
            "used": pieces[:MOST_PIECES],
        }
        for (kind, size, pieces), count in counts.items()
    ]
    with_free = [segment for segment in found if segment["free"]]
    return sorted(with_free, key=lambda segment: -segment["free"] * segment["count"])[:MOST_SEGMENTS]


def segment_table(used: Sequence[tuple[Segment, list[Piece]]], when: str = "at the peak") -> Table:
    """A row for each kind of segment: how many there are, how much of them is allocated, how much is free."""
    rows: list[Sequence[Cell]] = []
    for kind in ("small", "large", "expandable"):
        of_kind = [(segment, pieces) for segment, pieces in used if segment.kind == kind]
        if of_kind:
            rows.append(_row(kind, of_kind))
    if len(rows) > 1:
        rows.append(_row("all", list(used)))
    columns = ("segments", "count", "reserved", "allocated", "free in them", "largest free stretch")
    return Table(f"Segments {when}", columns, rows)


def _row(name: str, used: Sequence[tuple[Segment, list[Piece]]]) -> Sequence[Cell]:
    reserved = sum(segment.size_bytes for segment, _ in used)
    allocated = sum(piece.size_bytes for _, pieces in used for piece in pieces)
    free = max((gap for segment, pieces in used for gap in free_stretches(segment, pieces)), default=0)
    sizes = (reserved, allocated, reserved - allocated, free)
    return Cell(name), Cell(len(used), "number"), *(Cell(size, "bytes") for size in sizes)


@dataclass
class Section:
    """Everything that a page shows of one run."""

    name: str
    run: ReportRun
    answer: list[str]
    """The first sentences."""
    tiles: list[tuple[str, str, str]]
    """The main numbers, each as a name, a value and a detail, which may be empty."""
    missing: list[str]
    """Sentences on what cannot be shown, and why."""
    tables: dict[str, Table] = field(default_factory=dict[str, Table])
    """The tables by name, such as summary and kinds."""
    kinds: list[Kind] = field(default_factory=list[Kind])
    """The kinds of allocations, the most bytes first, MOST_KINDS at most."""
    answers: Answers | None = None
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the page's scripts draw, as JSON."""
    words: dict[str, str] = field(default_factory=dict[str, str])
    """Text of the template by name, such as what a chart shows for readers who cannot see it."""


def section_of(run: ReportRun) -> Section:
    """The section about a run."""
    section = Section(run.name, run, first_words(run), _tiles(run), _missing(run))
    found = kinds(run.history, run.profile)
    section.kinds = found[:MOST_KINDS]
    section.words["when"] = when = run.history.when if run.history else "at the peak"
    if found:
        section.tables["kinds"] = kinds_table(section.kinds, when)
    if len(found) > MOST_KINDS:
        rest = sum(kind.total_bytes for kind in found[MOST_KINDS:])
        section.words["rest"] = f"{len(found) - MOST_KINDS} more stacks hold {in_gib(rest)} together."
    section.data = {"name": run.name, "icicles": {}}
    if run.profile is not None:
        _add_profile(section, run.profile)
    if run.history is not None:
        _add_history(section, run.history)
    return section


def _add_profile(section: Section, profile: StepProfile) -> None:
    section.tables |= profile_tables(profile)
    if profile.oom is not None:
        section.words["oom"] = explain_oom(profile)
    section.data["capacity"] = profile.hardware.memory_bytes
    section.data["device"] = profile.hardware.name
    if profile.memory.at_peak_by_module:
        section.data["icicles"]["module"] = asdict(by_module(profile.memory.at_peak_by_module))
    if profile.phases:
        section.data["phases"] = {
            name: {
                "time": stats.time_s.model_dump(),
                "allocated": stats.peak_allocated_bytes,
                "reserved": stats.peak_reserved_bytes,
            }
            for name, stats in profile.phases.items()
        }
    answers = answers_about(section.run)
    if isinstance(answers, str):
        section.missing.append(answers)
    elif answers is not None:
        section.answers = answers
        section.tables["answers"] = answers.table
        section.data["answers"] = answers.bars
    roofline = roofline_of(profile, section.run.answers)
    if isinstance(roofline, str):
        section.missing.append(roofline)
    else:
        section.tables["roofline"] = roofline.table()
        section.data["roofline"] = roofline.data()


def _add_history(section: Section, history: History) -> None:
    if history.events:
        section.data["history"] = history_columns(history)
        section.words["timeline"] = _timeline_words(section.run, history)
    if history.oom is not None and history.oom.frames:
        section.words["asked_at"] = "\n".join(history.tree.stack(history.tree.node_of(history.oom.frames)))
    if section.run.profile is None and history.moment()[1]:
        section.tables["groups"] = groups_table(history)
    section.data["icicles"]["code"] = asdict(by_code(history))
    if history.events and (history.reserved_bytes == history.allocated_bytes()).all():
        section.missing.append(
            "Segments: reserved is always what is allocated, as without a caching allocator (on a CPU)."
        )
        return
    used = pieces_in_use(history.segments_then, history.live_at(history.moment()[0]))
    section.tables["segments"] = segment_table(used, history.when)
    section.data["segments"] = segments_with_most_free(used)


def _tiles(run: ReportRun) -> list[tuple[str, str, str]]:
    profile, history = run.profile, run.history
    if profile is None:
        if history is None:
            return []
        return _snapshot_tiles(history)
    memory, step, device = profile.memory, profile.step, profile.hardware
    tiles: list[tuple[str, str, str]] = []
    if memory.peak_allocated_bytes is not None:
        where = f"in {memory.peak_phase}" if memory.peak_phase else ""
        tiles.append(("Peak allocated", in_gib(memory.peak_allocated_bytes), where))
    if memory.peak_reserved_bytes is not None:
        tiles.append(("Peak reserved", in_gib(memory.peak_reserved_bytes), ""))
    if device.memory_bytes is not None:
        tiles.append(("Device", in_gib(device.memory_bytes), device.name))
    if step.time_s.median is not None:
        spread = (
            f"{in_ms(step.time_s.p10)} to {in_ms(step.time_s.p90)}" if step.time_s.p10 is not None else ""
        )
        tiles.append(("Step", in_ms(step.time_s.median), spread))
    if step.tokens_per_s is not None:
        bound = f"{step.bound} bound" if step.bound else ""
        tiles.append(("Tokens per second", f"{step.tokens_per_s:,.0f}", bound))
    if step.mfu is not None:
        tiles.append(("MFU", f"{step.mfu:.1%}", "" if step.hfu is None else f"HFU {step.hfu:.1%}"))
    return tiles


def _snapshot_tiles(history: History) -> list[tuple[str, str, str]]:
    """The main numbers of a snapshot by itself."""
    peak = history.peak()[1]
    if not history.events:
        count = f"{len(history.spans):,} blocks"
        reserved = f"{len(history.segments_then):,} segments"
        return [
            ("Allocated", in_gib(peak), count),
            ("Reserved", in_gib(history.reserved_at_end_bytes), reserved),
        ]
    tiles = [
        ("Peak allocated", in_gib(peak), f"{history.events:,} allocations and frees recorded"),
        ("Peak reserved", in_gib(int(history.reserved_bytes.max(initial=0))), ""),
    ]
    if (oom := history.oom) is not None:
        tiles += [
            ("Asked for", in_gib(oom.requested_bytes), f"with {in_gib(oom.device_free_bytes)} left"),
            (
                "Free in segments",
                in_gib(oom.free_in_segments_bytes),
                f"largest piece for it {in_gib(oom.largest_piece_bytes)}",
            ),
        ]
    return tiles


def _timeline_words(run: ReportRun, history: History) -> str:
    """What the timeline shows, in words."""
    event, peak = history.peak()
    phase = next((run.phase for run in history.phases if run.start <= event < run.end), None)
    where = f" in {phase}" if phase else ""
    words = (
        f"Allocated bytes after each of {history.events:,} allocations and frees, stacked by "
        f"{'category' if history.by_category else 'the code that allocated them'}. The peak, {in_gib(peak)}, "
        f"is event {event:,}{where}. Where events are closer than pixels, each pixel shows its highest: "
        "drag to zoom in, double-click to zoom out."
    )
    profile, drawn = run.profile, sum(phase_run.phase == "backward" for phase_run in history.phases)
    micro_batches = ((profile and profile.recipe) or {}).get("gradient_accumulation_steps", 1)
    if profile and profile.source == "simulated" and 0 < drawn < micro_batches:
        words += (
            f" Of the step's {micro_batches:,} micro batches {drawn} are drawn, as long as all of them take: "
            "the others do what the last but one of these does."
        )
    device = profile.hardware if profile else None
    if device is None or device.memory_bytes is None:
        return words
    return (
        f"{words} {device.name} has {in_gib(device.memory_bytes)}, a dashed line: “Up to capacity” brings it "
        "into sight."
    )


def _missing(run: ReportRun) -> list[str]:
    """What the run lacks, in sentences."""
    profile, history = run.profile, run.history
    missing = list(run.notes)
    if profile is None:
        missing.append(
            "A snapshot by itself has no recipe, no time by phase and no device's name: give the run folder "
            "for those."
        )
    if history is None:
        missing.append(
            "There is no memory history, so there is no timeline: give a run folder with a snapshot."
        )
        return missing
    if not history.events:
        missing.append(
            "The snapshot has no trace of events, so there is no timeline and no peak: this is what was held "
            'when it was taken. torch.cuda.memory._record_memory_history(stacks="python"), called before the '
            "model is made, records one."
        )
        if not any(span.frames for span in history.spans):
            missing.append("No stacks were recorded either: who asked for the memory cannot be said.")
    missing += history.notes
    if profile is not None:
        missing += _disagreement(profile, history)
    return missing


def _disagreement(profile: StepProfile, history: History) -> list[str]:
    """A sentence on why the profile's peak and the timeline's are not the same; none where they are."""
    between = (profile.phases.get(name, PhaseStats()) for name in PHASES_BETWEEN_STEPS)
    peaks = [profile.memory.peak_allocated_bytes, *(stats.peak_allocated_bytes for stats in between)]
    stated, recorded = max((peak for peak in peaks if peak is not None), default=None), history.peak()[1]
    if stated is None or stated == recorded:
        return []
    if profile.oom is not None:
        short = f"The profile tells of the moment when the memory ran out, {in_gib(stated)} allocated"
        return [f"{short}; the timeline's peak was {in_gib(recorded)}."]
    difference = (
        f"The profile's peak is {in_gib(stated)} ({stated:,} bytes), the timeline's {in_gib(recorded)} "
        f"({recorded:,} bytes): a trace shows requests rounded to 512 bytes, not what the allocator could "
        "not split off, and only the recorded steps."
    )
    return [difference]
