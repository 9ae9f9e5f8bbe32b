"""Makes the guide's pictures and tables from docs/data, and docs/data by the guide's commands.

python -m pages.pictures            draw what is not there or not of this data; write tables and toggles.md
python -m pages.pictures --again    first run every command again: some minutes, no GPU
python -m pages.pictures --check    fail if a table, or a picture's data, is not as it would be written
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image

from harness.report.table import Table, escape_markdown, markdown_of, markdown_table
from harness.step_profile.step_profile import StepProfile
from harness.sweep.document import Sweep
from harness.sweep.figures import digest, write_figures
from harness.sweep.table import table_of
from harness.system.files import write_whole
from harness.units import in_gib, in_ms
from pages.toggles import GROUPS, SEVERAL_GPUS, TOGGLES, WITHOUT_SWEEP, BuysAndCosts, Toggle

DOCS = Path(__file__).resolve().parents[1] / "docs"
DATA, PICTURES = DOCS / "data", DOCS / "pictures"
BUILD = DOCS.parent / "build" / "docs"
TIMELINE = "harness simulate llama-3.2-1b-bf16 hardware=h100 --out step"
CHARTS = ("timeline", "phases", "roofline", "answers")
"""Of the report, those that the guide shows."""
MODULES = 8
"""Of the guide's table of them."""
INTRODUCTION = """\
Each section has the command that made its figure and its numbers. `harness sweep` simulates the training step
on shape-only tensors for an H100: bytes are what PyTorch's allocator would count, times are estimated kernel
by kernel ([where the time goes](time.md)), with a range. Bars show the bytes live at the peak of a step, by
what they are; tokens per second count padding too."""


def main(again: bool) -> None:
    """Renew what is not up to date."""
    for folder in (DATA, PICTURES, BUILD):
        folder.mkdir(parents=True, exist_ok=True)
    if again or not all((PICTURES / f"step-{chart}.png").exists() for chart in CHARTS):
        _draw_step()
    for toggle in TOGGLES:
        if again or not data_of(toggle).exists():
            _sweep(toggle)
        sweep = Sweep.read(data_of(toggle))
        if drawn_from(picture_of(toggle)) != digest(sweep):
            write_figures(sweep, PICTURES)
    write_whole(DOCS / "toggles.md", toggles_page())
    for page in DOCS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        if (filled := with_numbers(text)) != text:
            write_whole(page, filled)


def check() -> None:
    """Exits with what is not as `main` would leave it."""
    stale = [
        toggle.field
        for toggle in TOGGLES
        if drawn_from(picture_of(toggle)) != digest(Sweep.read(data_of(toggle)))
    ]
    if (DOCS / "toggles.md").read_text(encoding="utf-8") != toggles_page():
        stale.append("toggles.md")
    texts = {page.name: page.read_text(encoding="utf-8") for page in DOCS.glob("*.md")}
    stale += [name for name, text in texts.items() if with_numbers(text) != text]
    if stale:
        sys.exit(f"not as written: {', '.join(stale)}. Run: python -m pages.pictures")


def with_numbers(page: str) -> str:
    """The page with its tables and answers as the data has them."""
    page = re.sub(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", _table, page, flags=re.DOTALL)
    return re.sub(r"(<!-- answer: (\w+) -->\n).*?(<!-- end of answer -->)", _answer, page, flags=re.DOTALL)


def _table(found: re.Match[str]) -> str:
    profile = StepProfile.read(DATA / "step.json")
    rows = {"phases": phase_rows, "memory": memory_rows, "modules": module_rows}[found[2]](profile)
    return found[1] + markdown_table(rows[0], rows[1:], range(1, len(rows[0]))) + found[3]


def _answer(found: re.Match[str]) -> str:
    sweep = Sweep.read(DATA / f"{found[2]}.json")
    return f"{found[1]}> {' '.join(escape_markdown(text) for text in sweep.answers)}\n{found[3]}"


def phase_rows(profile: StepProfile) -> list[tuple[str, ...]]:
    """Time and peaks of each phase."""
    rows = [("phase", "time", "peak allocated", "at its end")]
    for name, stats in profile.phases.items():
        sizes = map(in_gib, (stats.peak_allocated_bytes, stats.allocated_at_end_bytes))
        rows.append((name.replace("_", " "), in_ms(stats.time_s.median), *sizes))
    return rows


def module_rows(profile: StepProfile) -> list[tuple[str, ...]]:
    """The modules that take most of the device's time."""
    found = profile.modules_s()
    whole = sum(found.values())
    largest = [*found.items()][:MODULES]
    rows = [(f"`{name}`", in_ms(seconds), f"{seconds / whole:.1%}") for name, seconds in largest]
    return [("module", "time", "share"), *rows]


def memory_rows(profile: StepProfile) -> list[tuple[str, ...]]:
    """The three sizes of memory, and what lies between them."""
    memory = profile.memory
    sizes = [
        ("allocated, at its peak", memory.peak_allocated_bytes),
        ("reserved, at its peak", memory.peak_reserved_bytes),
        ("reserved minus allocated", memory.fragmentation_bytes),
        ("CUDA context, as measured on an H100", memory.cuda_context_bytes),
        ("process, as nvidia-smi would show it", memory.process_bytes),
        ("memory of the device", profile.hardware.memory_bytes),
        ("peak of setup", memory.setup_peak_allocated_bytes),
        ("peak of the first step", memory.first_step_peak_allocated_bytes),
    ]
    return [("what", "bytes"), *((name, in_gib(size)) for name, size in sizes)]


def data_of(toggle: Toggle) -> Path:
    """The sweep.json that the toggle's command wrote."""
    return DATA / f"{toggle.field}.json"


def picture_of(toggle: Toggle) -> Path:
    """The picture that its command leaves."""
    return PICTURES / f"{toggle.field}.png"


def drawn_from(picture: Path) -> str | None:
    """Digest of the data that a picture was drawn from; None when there is no picture."""
    if not picture.exists():
        return None
    with Image.open(picture) as image:
        return image.info.get("Description")


def toggles_page() -> str:
    """toggles.md."""
    parts = [
        "# What each toggle buys and costs",
        "<!-- Written by pages/pictures.py from pages/toggles.py and docs/data. -->",
        INTRODUCTION,
    ]
    for group, toggles in GROUPS.items():
        parts.append(f"## {group}")
        parts += [_section(toggle) for toggle in toggles]
    parts += ["## Other libraries' own fields", *_in_words(WITHOUT_SWEEP)]
    parts += [
        "## More than one GPU",
        "What is divided, and what is not: [More than one GPU](several-gpus.md).",
        *_in_words(SEVERAL_GPUS),
    ]
    return "\n\n".join(parts) + "\n"


def _in_words(fields: dict[str, BuysAndCosts]) -> list[str]:
    return [
        f"### {field}\n\n**Buys:** {buys}\n\n**Costs:** {costs}" for field, (buys, costs) in fields.items()
    ]


def _section(toggle: Toggle) -> str:
    sweep = Sweep.read(data_of(toggle))
    values = ", ".join(str(value) for value in sweep.axes[toggle.field])
    alternative = f"Memory at the peak by category, and tokens per second, for {toggle.field} {values}"
    return "\n\n".join(
        [
            f"### {toggle.field}",
            f"**Buys:** {toggle.buys}\n\n**Costs:** {toggle.costs}",
            f"```\n{toggle.command}\n```",
            f"![{alternative}](pictures/{toggle.field}.png)",
            _cells(sweep),
            " ".join(escape_markdown(text) for text in sweep.answers),
            f"Data: [{data_of(toggle).name}](data/{data_of(toggle).name})",
        ]
    )


def _cells(sweep: Sweep) -> str:
    """The sweep's table without what the picture shows already."""
    table = table_of(sweep, with_reasons=False)
    shown = [n for n, name in enumerate(table.columns) if name not in ("peak in", "MFU", "bound")]
    columns, rows = [table.columns[n] for n in shown], [[row[n] for n in shown] for row in table.rows]
    return markdown_of(Table(table.name, columns, rows)).removesuffix("\n")


def _sweep(toggle: Toggle) -> None:
    folder = BUILD / toggle.field
    _run([*shlex.split(toggle.command.removesuffix(" --png")), "--out", str(folder)])
    sweep = Sweep.read(folder / "sweep.json")
    where = Path(str(sweep.base.get("data")))
    if where.is_relative_to(DOCS.parent):  # a path of this machine means nothing elsewhere
        sweep.base["data"] = str(where.relative_to(DOCS.parent))
    write_whole(data_of(toggle), sweep.to_json())


def _draw_step() -> None:
    folder = BUILD / "step"
    shutil.rmtree(folder, ignore_errors=True)
    _run([*shlex.split(TIMELINE)[:-1], str(folder)])
    _run(["harness", "report", str(folder), "--png", str(BUILD / "pictures")])
    shutil.copy(folder / "profile.json", DATA / "step.json")
    for chart in CHARTS:
        shutil.copy(BUILD / "pictures" / f"step-{chart}.png", PICTURES)


def _run(command: list[str]) -> None:
    print(shlex.join(command), flush=True)
    subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        check()
    else:
        main(again="--again" in sys.argv[1:])
