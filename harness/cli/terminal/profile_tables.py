"""The tables of a profile in the terminal."""

from rich.console import Console
from rich.table import Table

from harness.cli.terminal.terminal import print_table, rows_table, say
from harness.step_profile import (
    KERNELS,
    MEMORY_KINDS,
    PHASES,
    WITHOUT_HOST,
    RanksReport,
    StepProfile,
    TimeStats,
    ranks_in_words,
    time_in_words,
)
from harness.system import is_object
from harness.units import counted, in_gib, ms


def print_profile(console: Console, profile: StepProfile) -> None:
    """Print the tables of a profile: phases, ranks, kernels and memory at the peak by category, and then
    lines with other facts."""
    table = _phase_table(profile, tight=console.width < 90)
    if len(table.columns) > 1:
        say(console, f"{profile.source}: one step by phase")
        print_table(console, table)
    if profile.ranks is not None and len(profile.ranks.ranks) > 1:
        whose = f"the other tables are of rank {profile.ranks.peak_rank}, which peaks highest"
        say(console, f"{profile.ranks.world_size} ranks; {whose}")
        print_table(console, _ranks_table(profile.ranks))
        for line in ranks_in_words(profile.ranks):
            say(console, line)
    kernels = _kernel_table(profile)
    if kernels is not None:
        say(console, "where the device's time goes, by kind of kernel")
        print_table(console, kernels)
    if profile.memory.at_peak.total_bytes():
        where = profile.memory.peak_phase
        say(console, f"memory at the peak{f', in {where}' if where else ' of the recorded steps'}")
        print_table(console, _memory_table(profile))
    for line in _facts(profile):
        say(console, line)


def _phase_table(profile: StepProfile, *, tight: bool) -> Table:
    """A row for each phase and one for the step; columns in which nothing is known are left out. With `tight`
    the table fits 80 columns."""
    step, memory = profile.step.time_s, profile.memory
    total = sum(profile.phases[name].time_s.median or 0 for name in PHASES if name in profile.phases)
    rows = {
        name: (
            name,
            _median(stats.time_s),
            _range(stats.time_s),
            f"{(stats.time_s.median or 0) / total:.0%}" if total and name in PHASES else "-",
            "-" if stats.communication_s is None else ms(stats.communication_s),
            in_gib(stats.peak_allocated_bytes),
            in_gib(stats.peak_reserved_bytes),
            in_gib(stats.allocated_at_end_bytes),
        )
        for name in profile.phase_names()
        for stats in [profile.phases[name]]
    }
    headings = ("phase", "time, ms", "p10 - p90", "share", "waiting, ms", "peak", "reserved", "at end")
    known = [i for i in range(len(headings)) if any(row[i] != "-" for row in rows.values())]
    peaks = (in_gib(memory.peak_allocated_bytes), in_gib(memory.peak_reserved_bytes))
    waits = [s for stats in profile.phases.values() if (s := stats.communication_s) is not None]
    waited = ms(sum(waits)) if waits else "-"
    rows["step"] = ("step", _median(step), _range(step), "", waited, *peaks, "")
    names = (*PHASES, "step", *(name for name in profile.phase_names() if name not in PHASES))
    shown = [[rows[name][i] for i in known] for name in names if name in rows]
    return rows_table([headings[i] for i in known], shown, padding=0 if tight else 1, bold="step")


def _ranks_table(ranks: RanksReport) -> Table:
    """For each quantity the least and the most of all ranks, and the ranks that have them."""
    rows: dict[str, list[tuple[float | None, int]]] = {
        "peak": [(rank.peak_allocated_bytes, rank.rank) for rank in ranks.ranks],
        "reserved": [(rank.peak_reserved_bytes, rank.rank) for rank in ranks.ranks],
        **{f"{name}, ms": [(rank.phases_s.get(name), rank.rank) for rank in ranks.ranks] for name in PHASES},
        "step, ms": [(rank.step_s, rank.rank) for rank in ranks.ranks],
        "waiting, ms": [
            (sum(rank.communication_s.values()) if rank.communication_s else None, rank.rank)
            for rank in ranks.ranks
        ],
    }
    shown: list[list[str]] = []
    for name, found in rows.items():
        known = [(value, rank) for value, rank in found if value is not None]
        if known:
            (least, of_rank), (most, on_rank) = min(known), max(known)
            in_unit = ms if name.endswith("ms") else in_gib
            shown.append([name, in_unit(least), str(of_rank), in_unit(most), str(on_rank)])  # type: ignore[arg-type]
    return rows_table(("of all ranks", "least", "on", "most", "on"), shown)


def _kernel_table(profile: StepProfile) -> Table | None:
    """The milliseconds of each kind of kernel by phase, the longest first; None where they are not known."""
    phases = [name for name in profile.phase_names() if profile.phases[name].kernels_s and name in PHASES]
    totals = profile.kernels_s()
    whole = sum(totals.values())
    if not whole:
        return None
    rows: list[list[str]] = []
    for kernel, total in totals.items():
        by_phase = (profile.phases[name].kernels_s.get(kernel) for name in phases)
        cells = ("-" if seconds is None else ms(seconds) for seconds in by_phase)
        rows.append([KERNELS.get(kernel, kernel), *cells, ms(total), f"{total / whole:.1%}"])
    headings = ("kernels", *(f"{name}, ms" for name in (*phases, "step")), "share")
    return rows_table(headings, rows, wraps=(0,))


def _memory_table(profile: StepProfile) -> Table:
    at_peak = profile.memory.at_peak
    total = at_peak.total_bytes()
    sizes = at_peak.by_category().items()
    rows = [(name, in_gib(size), f"{size / total:.1%}") for name, size in sizes if size]
    return rows_table(("category", "bytes", "share"), [*rows, ("peak", in_gib(total), "")], bold="peak")


def _facts(profile: StepProfile) -> list[str]:
    """Lines with what no table has: device, other peaks, speed, loss, data, warnings."""
    memory, step = profile.memory, profile.step
    lines = [f"device: {profile.hardware.name}; memory is {MEMORY_KINDS[memory.kind]}"]
    apart = [
        ("setup peak", memory.setup_peak_allocated_bytes),
        ("first step peak", memory.first_step_peak_allocated_bytes),
        ("process on the device", memory.process_bytes),
        ("pinned or offloaded on the host", memory.host_bytes),
        ("process on the host", step.host_rss_bytes),
    ]
    lines.append("; ".join(f"{name} {in_gib(size)}" for name, size in apart if size is not None))
    times = profile.provenance.get("times")
    if step.time_s.median is not None and isinstance(times, str):
        lines.append(f"times: {times}")
    if step.tokens_per_s is not None:
        mfu = "" if step.mfu is None else f", MFU {step.mfu:.1%}"
        never_late = isinstance(times, str) and WITHOUT_HOST in times
        late = " if the device never waits for the host" if never_late else ""
        lines.append(f"{step.tokens_per_s:,.0f} tokens/s{mfu}{late}")
    if time := time_in_words(profile.parts_of_time_s()):
        known = step.tokens_per_s_range()
        sure = "" if known is None else f"; {known[0]:,.0f} to {known[1]:,.0f} tokens/s four times of five"
        lines.append(f"time: {time}{sure}")
    if step.bound is not None:
        lines.append(f"the step is {step.bound} bound")
    if step.loss:
        unknown = "not known" if profile.not_finite is None else "not finite"
        first, last = (unknown if loss is None else f"{loss:.4f}" for loss in (step.loss[0], step.loss[-1]))
        lines.append(f"loss {first} -> {last} over {len(step.loss)} steps")
    lines += _data(profile)
    if profile.not_finite is not None:
        lines.append(f"steps with a loss or weights not finite: {profile.not_finite.num_steps}")
    lines += [f"warning: {warning}" for warning in profile.warnings]
    return [line for line in lines if line]


def _data(profile: StepProfile) -> list[str]:
    """A line on how the documents fit the rows, where the profile has a DataSummary (data/rows.py)."""
    data = profile.provenance.get("data")
    names = ("documents", "rows", "documents_cut", "longest_document_tokens", "tokens_cut", "padding_share")
    if not is_object(data) or not all(isinstance(data.get(name), int | float) for name in names):
        return []
    padding = f"{data['padding_share']:.0%} of them padding"
    line = f"data: {counted(data['documents'], 'document')} in {counted(data['rows'], 'row')}, {padding}"
    if data["documents_cut"]:
        line += (
            f"; {data['documents_cut']:,} are cut off ({data['tokens_cut']:,} tokens lost, the longest has "
            f"{data['longest_document_tokens']:,})"
        )
    return [line]


def _median(time_s: TimeStats) -> str:
    return "-" if time_s.median is None else ms(time_s.median)


def _range(time_s: TimeStats) -> str:
    if time_s.p10 is None or time_s.p90 is None:
        return "-"
    return f"{ms(time_s.p10)} - {ms(time_s.p90)}"
