"""Keeps the numbers of README and of two pages of the guide equal to committed results.

python -m pages.readme               write them from what is in profiles/ and docs/data
python -m pages.readme --check       fail if they are not so
python -m pages.readme RUN_FOLDER    first take that run's profile as the committed one
"""

import json
import math
import sys
from itertools import chain
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

from harness.hardware import Calibration
from harness.report.table import markdown_table
from harness.step_profile.memory import CATEGORIES
from harness.step_profile.step_profile import PHASES, StepProfile
from harness.system.files import write_whole
from harness.units import in_gib, in_ms
from pages.cover import sentences
from pages.parts import write_or_check
from pages.profiles.published import error, errors_of
from pages.profiles.rows import Row, read_rows

ROOT = Path(__file__).resolve().parents[1]
PROFILE = ROOT / "docs" / "data" / "smoke.json"
PUBLISHED = ROOT / "profiles" / "published" / "results.json"
NAPKIN_ERROR = ROOT / "profiles" / "napkin_error.json"
PAGES = (ROOT / "README.md", ROOT / "docs" / "answers.md", ROOT / "docs" / "output.md")
EMULATED = ROOT / "profiles" / "emulated-h200"
MEASURED_ON = ROOT / "profiles"
SLOW_HOSTS = ROOT / "profiles" / "cpu" / "slow_hosts.json"
PEAKS = ("peak allocated", "peak reserved")
BEGIN, END = "<!-- {}: written by pages/readme.py -->\n", "<!-- end of {} -->\n"
SHOWN = {
    "litgpt-res/phi-1.5/lora/None/mb4": "phi-1.5, LoRA, 4 x 1044 tokens",
    "litgpt-res/StableLM-base-alpha-3b/lora/bnb.nf4/mb1": "StableLM 3B, QLoRA, 1 x 1034 tokens",
    "litgpt-res/Llama-2-7B/lora/None/mb1": "Llama-2-7B, LoRA, 1 x 1304 tokens",
    "litgpt-res/Llama-2-7B/lora/None/mb2": "Llama-2-7B, LoRA, 2 x 1304 tokens",
    "litgpt-res/Llama-2-7B/lora/bnb.nf4-dq/mb1": "Llama-2-7B, QLoRA with double quantization",
    "litgpt-res/Llama-2-13B/lora/None/mb1": "Llama-2-13B, LoRA, 1 x 1304 tokens",
    "litgpt-res/Llama-2-13B/lora/bnb.nf4/mb1": "Llama-2-13B, QLoRA, 1 x 1304 tokens",
}
"""Published rows by id, and what README calls them: one for each model and method."""

ON_A_VIRTUAL_GPU = {
    "llama-3.1-8b-full-bf16": "Llama-3.1-8B, every weight, bf16",
    "llama-3.1-8b-lora-batch-16": "Llama-3.1-8B, LoRA, 16 x 2048 tokens",
    "llama-3.1-8b-qlora": "Llama-3.1-8B, QLoRA, 1 x 2048 tokens",
    "mixtral-qlora": "Mixtral 8x7B, QLoRA, 1 x 2048 tokens",
    "llama-3.1-70b-qlora": "Llama-3.1-70B, QLoRA, 1 x 2048 tokens",
}
"""Recipes of the virtual GPU that the guide shows."""
MEASURED = {
    "h100": {
        "llama-3.1-8b-full-bf16": "Llama-3.1-8B, every weight, bf16",
        "llama-3.1-8b-lora": "Llama-3.1-8B, LoRA, 1 x 2048 tokens",
        "llama-3.1-8b-qlora": "Llama-3.1-8B, QLoRA, 1 x 2048 tokens",
        "gemma-2-2b-lora": "Gemma-2-2B, LoRA, 1 x 2048 tokens",
        "mistral-7b-qlora": "Mistral-7B, QLoRA, 1 x 2048 tokens, 4 micro batches",
    },
    "h200": {
        "llama-3.1-8b-full-bf16-batch-8": "Llama-3.1-8B, every weight, bf16, 8 x 2048 tokens",
        "llama-3.1-8b-lora-seq-8192": "Llama-3.1-8B, LoRA, 1 x 8192 tokens",
        "llama-3.1-8b-qlora-batch-4": "Llama-3.1-8B, QLoRA, 4 x 2048 tokens",
        "mixtral-qlora": "Mixtral 8x7B, QLoRA, 1 x 2048 tokens",
        "llama-3.1-8b-int8-lora": "Llama-3.1-8B, LoRA on int8 weights, 1 x 2048 tokens",
    },
}
"""The same of the cards that were measured."""


def table(profile: StepProfile) -> str:
    """Markdown: bytes at the peak by category, then time by phase."""
    rows: list[tuple[str, str]] = []
    for name in CATEGORIES:
        size = getattr(profile.memory.at_peak, f"{name}_bytes")
        if size:
            rows.append((name.replace("_", " "), in_gib(size)))
    rows.append(
        (f"**peak, in {profile.memory.peak_phase}**", f"**{in_gib(profile.memory.peak_allocated_bytes)}**")
    )
    rows.append(("**time of a step**", ""))
    rows += [(name.replace("_", " "), in_ms(profile.phases[name].time_s.median)) for name in PHASES]
    rows.append(("**step**", f"**{in_ms(profile.step.time_s.median)}**"))
    rows.append(("tokens per second", f"{profile.step.tokens_per_s:,.0f}"))
    return markdown_table(("memory at the peak", "measured"), rows, {1})


def published_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: some published peaks with both answers, and the errors over all of them."""
    by_id = {row["id"]: row for row in rows}
    columns = ("A100, peak allocated", "napkin", "simulated", "measured by others")
    lines = []
    for name, shown in SHOWN.items():
        row = by_id[name]
        cells = [_answer(row, answer) for answer in ("napkin", "simulated")]
        lines.append((shown, *cells, in_gib(row["measured_bytes"])))
    for what, source, which in (
        ("training runs: median error", "litgpt", "median"),
        ("training runs: largest error", "litgpt", "largest"),
        ("modules and kernels: largest error", "liger-kernel", "largest"),
    ):
        of = [row for row in rows if row["id"].startswith(source)]
        errors = [errors_of(of, answer) for answer in ("napkin", "simulated")]
        cells = [f"**{getattr(e, which):.2%}** of {e.count}" if e.count else "" for e in errors]
        lines.append((f"**{what}**", *cells, ""))
    return markdown_table(columns, lines, range(1, len(columns)))


def peaks_table(title: str, rows: list[Row], shown: dict[str, str]) -> str:
    """Markdown: peaks that ran, measured or emulated, beside both answers, and the errors over all rows."""
    ran = rows[0].ran.source
    beside = ("simulated", "emulated") if ran == "measured" else ("simulated",)
    columns = (
        *((source, "allocated") for source in ("napkin", *beside, ran)),
        *((source, "reserved") for source in (*beside, ran)),
    )
    titles = [f"{'PyTorch' if source == ran == 'emulated' else source}, {what}" for source, what in columns]
    by_name = {row.name: row for row in rows}
    lines: list[tuple[str, ...]] = [
        (words, *(_peak(by_name[name], source, what) for source, what in columns))
        for name, words in shown.items()
    ]
    errors = [_errors(rows, source, f"peak {what}") for source, what in columns]
    exact = [f"**{of.count(0)}** of {len(of)}" if of else "" for of in errors]
    middle = [f"**{median(map(abs, of)):.2%}**" if of else "" for of in errors]
    largest = [f"**{max(map(abs, of)):.2%}**" if of else "" for of in errors]
    lines += [
        ("**exact to the byte**", *exact),
        ("**median error**", *middle),
        ("**largest error**", *largest),
    ]
    return markdown_table((title, *titles), lines, range(1, 1 + len(titles)))


def on_hardware(folder: Path, rows: list[Row]) -> str:
    """Markdown: what a process takes and how long a step does, and where the time that is missing goes."""
    process = [abs(off) for off in _errors(rows, "simulated", "process")]
    alone, waiting = times_of(folder.name, rows)
    off = [abs(time - 1) for time in alone]
    kernels = json.loads((folder / "kernels.json").read_bytes())["all"]
    profiled, calibrated = (_done(folder, part) for part in ("profile", "calibrate"))
    steps_ms = sum(step["step_s"] for step in profiled.values()) * 1e3
    operator_us, assumed_us = calibrated["launch"]["operator_s"] * 1e6, Calibration().host_op_s * 1e6
    text = (
        f"What NVML counts for the process is off by {median(process):.2%} in the median and by "
        f"{max(process):.2%} at most. Of the steps that even a slow host does not lengthen, {len(alone)} "
        f"here, the simulated time is off by {median(off):.1%} in the median and {max(off):.1%} at most. The "
        f"others wait for their host: they took {median(waiting):.2f} times as long as simulated in the "
        f"median, {max(waiting):.2f} times at most. The kernels of {len(profiled)} steps take "
        f"{kernels['measured_ms']:,.0f} ms and are estimated at {kernels['estimated_ms']:,.0f} ms "
        f"(`profiles/{folder.name}/kernels.json`), while the steps take {steps_ms:,.0f} ms: in between the "
        f"GPU waits. That machine took {operator_us:.0f} us for an operator in one process "
        f"(`profiles/{folder.name}/programme/calibrate.json`), and estimates take {assumed_us:.0f} us unless "
        "they are told another number."
    )
    return fill(text, 118, break_long_words=False) + "\n"


def times_of(card: str, rows: list[Row]) -> tuple[list[float], list[float]]:
    """Measured over simulated time of a card's steps: of those whose kernels, in forward and in backward,
    take longer than a slow host does (benchmarks/time/slow_hosts.py), and of the others."""
    found = json.loads(SLOW_HOSTS.read_bytes())
    of_card = [row for row in found["rows"] if row["device"] == card]
    lengthened = {row["recipe"] for row in of_card if row["host_s"] * found["slow"] > row["kernels_s"]}
    known = {row["recipe"] for row in of_card}
    alone: list[float] = []
    waiting: list[float] = []
    for row in rows:
        if row.name in known and (ratio := row.ratio("simulated", "step time")) is not None:
            (waiting if row.name in lengthened else alone).append(1 / ratio)
    return alone, waiting


def _done(folder: Path, part: str) -> dict[str, Any]:
    """The results of a part of the hardware programme, by name, of the pieces that ran."""
    document = json.loads((folder / "programme" / f"{part}.json").read_bytes())
    return {each["name"]: each["result"] for each in document["results"] if each["status"] == "ok"}


def hardware_sentence(measured: dict[str, list[Row]], emulated: list[Row]) -> str:
    """Of how many recipes the simulation has allocated and reserved memory to the byte; and its times."""
    on_cards, on_virtual = map(_exact_ones, ([*chain(*measured.values())], emulated))
    steps = [
        each
        for card in measured
        for each in json.loads((MEASURED_ON / card / "kernels.json").read_bytes())["recipes"].values()
    ]
    kernels = [abs(each["estimated_ms"] / each["measured_ms"] - 1) for each in steps]
    both = [times_of(card, rows) for card, rows in measured.items()]
    known = [row for row in chain(*measured.values()) if row.value("measured", "step time") is not None]
    within = sum(map(_in_range, known))
    off = [abs(time - 1) for alone, _ in both for time in alone]
    waiting = [time for _, those in both for time in those]
    return (
        "[On an H100 and an H200](docs/answers.md#who-checks-the-simulation) the simulation has PyTorch's "
        f"own counters of {on_cards} full-size recipes to the byte, reserved memory too (with int8 weights "
        f"it depends on values), and of {on_virtual} on a virtual GPU ([our "
        f"results](profiles/README.md)). All kernels of a step together take what is estimated within "
        f"{median(kernels):.1%} in the median of {len(kernels)} steps, and {max(kernels):.1%} at most. A "
        f"step that the GPU limits takes what is simulated within {median(off):.1%} in the median of "
        f"{len(off)}, and {max(off):.1%} at most; those that wait for the slow hosts of these machines took "
        f"{median(waiting):.1f} times as long. {within} of all {len(known)} are in the range that is given. "
        f"{_torchtunes_own()}\n"
    )


def _torchtunes_own() -> str:
    """What torchtune's recipes take on a virtual GPU, beside its own table."""
    rows = json.loads((MEASURED_ON / "published" / "torchtune.json").read_bytes())["rows"]
    peaks = [abs(row["peak_active_gib"] / row["measured_gib"] - 1) for row in rows]
    speeds = [abs(row["estimated"] / row["measured"] - 1) for row in rows]
    return (
        "torchtune's own recipes, unchanged on a virtual GPU, have the peaks of [its table of an A100]"
        "(docs/time.md#held-against-other-rows-with-tokens-a-second) within "
        f"{median(peaks):.1%} in the median of {len(rows)} rows, and its speeds within {median(speeds):.1%}: "
        "compiled, packed, and with 4-bit weights."
    )


def _in_range(row: Row) -> bool:
    """Whether the measured step took a time within the range of the simulated one."""
    given = row.profiles["simulated"].step.time_s
    return (given.p10 or 0.0) <= (row.value("measured", "step time") or 0.0) <= (given.p90 or math.inf)


def _exact_ones(rows: list[Row]) -> str:
    """How many are exact, of those that did not run out of memory."""
    offs = [[off for what in PEAKS for off in _errors([row], "simulated", what)] for row in rows]
    known = [each for each in offs if each]
    return f"{sum(not any(each) for each in known)} of {len(known)}"


def _peak(row: Row, source: str, what: str) -> str:
    (off,) = _errors([row], source, f"peak {what}") or [None]
    error_shown = "" if off is None else " (exact)" if off == 0 else f" ({off:+.2%})"
    return f"{in_gib(int(row.value(source, f'peak {what}') or 0))}{error_shown}"


def _errors(rows: list[Row], source: str, what: str) -> list[float]:
    """Of the predictions; PyTorch's own numbers have none."""
    if not rows or source == rows[0].ran.source:
        return []
    return [ratio - 1 for row in rows if (ratio := row.ratio(source, what)) is not None]


def _answer(row: dict[str, Any], answer: str) -> str:
    off = error(row, answer)
    return "" if off is None else f"{in_gib(row[f'{answer}_bytes'])} ({off:+.2%})"


def written(profile: StepProfile, rows: list[dict[str, Any]], emulated: list[Row]) -> dict[str, str]:
    """Every part that is written, by the name in its markers."""
    return {
        "published": published_table(rows),
        "emulated": peaks_table("H200, peak", emulated, ON_A_VIRTUAL_GPU),
        "smoke": table(profile),
        "cover": sentences(),
    }


def napkin_error(document: dict[str, Any]) -> str:
    """Markdown: how far napkin's peaks and times are from the simulation's, over all rows and by toggles."""
    rows = [row for row in document["rows"] if row["simulated"]]
    by_toggles: dict[str, list[dict[str, float]]] = {"all": []}
    farthest: dict[str, list[tuple[float, str]]] = {"bytes": [], "s": []}
    for row in rows:
        off = {what: row["napkin"][what] / row["simulated"][what] - 1 for what in farthest}
        for name in ("all", row["toggles"]):
            by_toggles.setdefault(name, []).append({what: abs(each) for what, each in off.items()})
        for what, each in off.items():
            farthest[what].append((abs(each), f"{row['model']} {row['toggles']} ({each:+.0%})"))
    peaks, times = ([each[what] for each in by_toggles["all"]] for what in farthest)
    models = len({row["model"] for row in rows})
    said = (
        f"Over {len(rows)} steps of {models} models on an {document['device'].upper()}, napkin's peak is "
        f"{median(peaks):.2%} off from the simulation's in the median, at most 5 % in\n"
        f"{sum(each <= 0.05 for each in peaks)} of them, and {max(peaks):.0%} at most. Its time of a step is "
        f"{median(times):.0%} off in the median, at most 25 % in {sum(each <= 0.25 for each in times)}.\n\n"
    )
    lines = []
    for name, found in by_toggles.items():
        peaks, times = ([each[what] for each in found] for what in farthest)
        of_peaks = f"{median(peaks):.2%}", f"{max(peaks):.1%}"
        lines.append((name, str(len(found)), *of_peaks, f"{median(times):.0%}", f"{max(times):.0%}"))
    heads = ("toggles", "steps", "peak: median error", "largest", "time: median error", "largest")
    table = markdown_table(heads, lines, range(1, 6))
    named = [
        ", ".join(text for _, text in sorted(each, key=lambda one: -one[0])[:5]) for each in farthest.values()
    ]
    return f"{said}{table}\nFarthest off: of peaks {named[0]}; of times {named[1]}.\n"


def with_parts(page: str, parts: dict[str, str]) -> str:
    """`page` with the text between the markers of each part that it has replaced."""
    for name, text in parts.items():
        begin, end = BEGIN.format(name), END.format(name)
        if begin in page:
            before, rest = page.split(begin)
            _, after = rest.split(end)
            page = f"{before}{begin}{text}{end}{after}"
    return page


def committed_parts() -> dict[str, str]:
    """The parts as the committed results have them."""
    rows = json.loads(PUBLISHED.read_text(encoding="utf-8"))["rows"]
    parts = written(StepProfile.read(PROFILE), rows, read_rows(EMULATED))
    measured = {card: read_rows(MEASURED_ON / card) for card in MEASURED}
    parts["measured"] = "\n".join(
        f"{peaks_table(f'{card.upper()}, peak', rows, MEASURED[card])}\n"
        f"{on_hardware(MEASURED_ON / card, rows)}"
        for card, rows in measured.items()
    )
    parts["hardware"] = hardware_sentence(measured, read_rows(EMULATED))
    return parts | {"napkin": napkin_error(json.loads(NAPKIN_ERROR.read_text(encoding="utf-8")))}


def adopt(run_folder: Path) -> None:
    """Commit a run's profile: its data file named from the checkout's root, as on any machine."""
    profile = StepProfile.read(run_folder / "profile.json")
    profile.recipe["data"] = str(Path(profile.recipe["data"]).relative_to(ROOT))
    write_whole(PROFILE, profile.to_json() + "\n")


def main(arguments: list[str]) -> None:
    """Write the parts, or with --check fail if a page is not as it would be written."""
    check = "--check" in arguments
    for run_folder in (Path(text) for text in arguments if text != "--check"):
        adopt(run_folder)
    parts = committed_parts()
    filled = {page: with_parts(page.read_text(encoding="utf-8"), parts) for page in PAGES}
    write_or_check(filled, "pages.readme", check=check)


if __name__ == "__main__":
    main(sys.argv[1:])
