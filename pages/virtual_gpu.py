"""The tables of docs/virtual-gpu.md and README's picture of programs, from committed results:

    profiles/cpu/virtual_gpu_recipes.json     python -m benchmarks.virtual_gpu.recipes --out FILE
    profiles/cpu/virtual_gpu_programs.json    python -m benchmarks.virtual_gpu.programs --out FILE
    profiles/cpu/virtual_gpu_compiled.json    python -m benchmarks.virtual_gpu.compiled --out FILE
    profiles/cpu/virtual_gpu_versions.json    python -m benchmarks.virtual_gpu.versions --out FILE
    profiles/cpu/virtual_gpu_recordings.json  python -m benchmarks.virtual_gpu.anew --out FILE
    profiles/cpu/virtual_gpu_times.json       python -m benchmarks.virtual_gpu.times --out FILE
    profiles/cpu/virtual_gpu_clock.json       python -m benchmarks.virtual_gpu.clock_cost --out FILE

python -m pages.virtual_gpu            write them
python -m pages.virtual_gpu --check    fail if they are not so
"""

import json
import sys
from collections.abc import Iterable
from html import escape
from typing import Any

from harness.report.table import markdown_table
from harness.units import in_gib
from pages.parts import ROOT, with_parts, write_or_check

RESULTS = ROOT / "profiles" / "cpu"
PAGE = ROOT / "docs" / "virtual-gpu.md"
PICTURE = ROOT / "docs" / "pictures" / "emulate.svg"


def _markdown(head: str, rows: Iterable[Iterable[str]]) -> str:
    """`head`: a column is left, or with a colon behind its name right."""
    names = head.split("|")
    right = [place for place, name in enumerate(names) if ":" in name]
    return markdown_table([name.strip(" :") for name in names], [tuple(row) for row in rows], right)


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def recipes(found: dict[str, Any]) -> str:
    """A row for each recipe on each device, and the versions it is of."""
    head = "recipe | device | emulated, allocated: | simulated: | emulated, reserved: | simulated:"
    rows = ([f"`{row['recipe']}`", row["gpu"], *_cells(row)] for row in found["rows"])
    return f"{_markdown(head, rows)}\nWith {_versions(found['versions'])}; `{' '.join(found['changed'])}`.\n"


def _cells(row: dict[str, Any]) -> list[str]:
    if "impossible" in row:
        return [row["impossible"].replace("|", "\\|"), "", "", ""]
    emulated, simulated = row["emulated"], row["simulated"]
    cells = []
    for name in ("allocated_bytes", "reserved_bytes"):
        cells.append(in_gib(emulated[name]) if emulated["fits"] else "out of memory")
        cells.append(_beside(simulated, emulated, name))
    return cells


def _beside(simulated: dict[str, Any], emulated: dict[str, Any], name: str) -> str:
    if not simulated["fits"]:
        return "out of memory"
    if not emulated["fits"]:
        return in_gib(simulated[name])
    apart = simulated[name] - emulated[name]
    return "the same" if apart == 0 else f"{apart:+,} bytes"


def programs(found: dict[str, Any]) -> str:
    """A row for each program at full size, and what its authors saw of the same on a GPU."""
    full = _full(found)
    head = "program | model | device | processes: | allocated: | reserved: | processor seconds: | versions"
    table = _markdown(head, (_program(row) for row in full if not row.get("failed")))
    failed = _failed([row for row in full if row.get("failed")])
    said = "".join(_said(row) for row in full if row["published"])
    torch = ", ".join(sorted({row["versions"]["torch"] for row in full}))
    return f"{table}\nWith torch {torch}; of several processes, the one that peaks.\n{failed}{said}"


def _failed(rows: list[dict[str, Any]]) -> str:
    """What programs lacked that did not come to their end."""
    if not rows:
        return ""
    table = _markdown("program | versions | what was missing", (_lacking(row) for row in rows))
    return f"\nThese did not come to their end, with the data and packages that were here:\n\n{table}"


def _lacking(row: dict[str, Any]) -> list[str]:
    versions = {name: number for name, number in row["versions"].items() if name != "torch"}
    return [row["program"], _versions(versions), row["failed"].replace("|", "/")[:200]]


def _full(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if row["size"] == "full"]


def _ran(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in _full(found) if not row.get("failed")]


def _program(row: dict[str, Any]) -> list[str]:
    processes = row["processes"]
    peaks = (
        in_gib(max(each[f"peak_{what}_bytes"] for each in processes)) for what in ("allocated", "reserved")
    )
    versions = _versions({name: number for name, number in row["versions"].items() if name != "torch"})
    first = [row["program"], row["model"], row["gpu"], str(len(processes))]
    return [*first, *peaks, f"{row['processor_s']:.0f}", versions]


def _said(row: dict[str, Any]) -> str:
    ours = list(dict.fromkeys(row["said"]))
    return (
        f"\n`{row['program']}` says here: {'; '.join(ours)}. Its authors published, of a GPU: "
        f"{'; '.join(row['published']['said'])} ({row['published']['source']}).\n"
    )


def compiled(found: dict[str, Any]) -> str:
    """A row for each model, eager against compiled."""
    peaks = "eager, allocated: | compiled: | eager, reserved: | compiled:"
    head = f"model, layers | {peaks} | eager, at work: | compiled: | kernels: | processor seconds:"
    rows = []
    for row in found["rows"]:
        eager, made = row["eager"], row["compiled"]
        peaks = [
            in_gib(each[f"peak_{what}_bytes"]) for what in ("allocated", "reserved") for each in (eager, made)
        ]
        seconds = f"{eager['processor_s']:.0f}, {made['processor_s']:.0f}"
        work = [f"{each['busy_s'] * 1e3:.1f} ms" for each in (eager, made)]
        rows.append([f"{row['model']}, {row['layers']}", *peaks, *work, str(made["kernels"]), seconds])
    about = f"`{found['recipe']}` on {found['rows'][0]['gpu']} with `{' '.join(found['changed'])}`"
    return f"{_markdown(head, rows)}\n{about}; {_versions(found['versions'])}.\n"


def versions(found: dict[str, Any]) -> str:
    """A row for each PyTorch, with how many of the tests passed."""
    head = "torch | CUDA | transformers | tests | passed: | failed: | skipped:"
    rows = (
        [row["torch"].partition("+")[0], row["cuda"], row["libraries"]["transformers"], f"`{row['chosen']}`"]
        + [str(row[outcome]) for outcome in ("passed", "failed", "skipped")]
        for row in found["rows"]
    )
    return _markdown(head, rows)


def recordings(found: dict[str, Any]) -> str:
    """How many recordings were made anew, and what became of them."""
    rows = found["rows"]
    made = [row for row in rows if "skipped" not in row]
    same = sum(row["difference"] is None for row in made)
    chosen = (
        f"Of {found['recordings']} recordings {len(rows)} were chosen by a hash and {len(made)} made anew"
    )
    parts = [f"{chosen}: {same} are the same, {sum(row['actions'] for row in made):,} actions in all."]
    parts += [f"`{row['recording']}` is not: {row['difference']}." for row in made if row["difference"]]
    reasons = sorted({row["skipped"] for row in rows if "skipped" in row})
    parts += [f"{len(rows) - len(made)} were not made, since {'; '.join(reasons)}."] if reasons else []
    return " ".join(parts) + f" With {_versions(found['versions'])}.\n"


def times(found: dict[str, Any]) -> str:
    """A row for each recipe: what the device's kernels take, by both answers."""
    head = "recipe | device | kernels: | unknown: | simulated: | emulated: | apart:"
    rows = (
        [
            f"`{' '.join([row['recipe'], *row['set']])}`",
            row["gpu"],
            f"{row['kernels']:,}",
            str(row["unknown_kernels"]),
        ]
        + [f"{row[f'{answer}_s'] * 1e3:.2f} ms" for answer in ("simulated", "emulated")]
        + [f"{row['apart']:+.2%}"]
        for row in found["rows"]
    )
    return f"{_markdown(head, rows)}\nWith {_versions(found['versions'])}.\n"


EXAMPLES = {
    "trl sft": "An unmodified command of TRL:",
    "FSDP2 loop, rank 0 of 8": "One rank of eight, alone, of a loop written by hand over FSDP2:",
    "FSDP2 loop, torchrun": "The same loop with a smaller model, two processes and a virtual NCCL:",
}


def examples(found: dict[str, Any]) -> str:
    """Commands as they were run, and what they took."""
    rows = {row["program"]: row for row in _full(found)}
    parts = []
    for name, sentence in EXAMPLES.items():
        row = rows[name]
        _, model, _, processes, allocated, reserved, seconds, _ = _program(row)
        each = "" if processes == "1" else f", each of {processes} processes"
        parts.append(
            f"{sentence}\n\n    {row['command']}\n\n"
            f"{allocated} allocated and {reserved} reserved at the peak{each}, for {model}; "
            f"{seconds} seconds of a processor in all.\n"
        )
    return "\n".join(parts)


HEADING = "What programs need of a GPU, found without one: peak of a process, allocated (dark) and reserved"
ROW_PX, BARS_PX, LEFT_PX = 24, 500, 290
STYLE = (
    "text{font:13px sans-serif;fill:#333}.head{font-weight:600}.reserved{fill:#c6dbef}"
    ".allocated{fill:#2b6ca3}.grid{stroke:#ddd}"
)


def picture(found: dict[str, Any]) -> str:
    """SVG: bars of each program's peak, allocated over reserved, on a white ground."""
    rows = _ran(found)
    peaks = [
        [max(each[f"peak_{what}_bytes"] for each in row["processes"]) for what in ("reserved", "allocated")]
        for row in rows
    ]
    most = -(-max(max(pair) for pair in peaks) // (8 << 30)) * 8  # GiB
    width, height = LEFT_PX + BARS_PX + 40, ROW_PX * (len(rows) + 2) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>What programs of others need, found without a GPU</title><style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text class="head" x="10" y="18">{HEADING}</text>',
    ]
    for gib in range(0, most + 1, 8):
        x, bottom = LEFT_PX + BARS_PX * gib / most, ROW_PX * (len(rows) + 1) + 8
        parts.append(f'<line class="grid" x1="{x:g}" x2="{x:g}" y1="{ROW_PX + 4}" y2="{bottom}"/>')
        parts.append(f'<text x="{x:g}" y="{bottom + 16}" text-anchor="middle">{gib} GiB</text>')
    for n, (row, (reserved, allocated)) in enumerate(zip(rows, peaks, strict=True), 1):
        y = ROW_PX * n + 8
        parts.append(f'<text x="10" y="{y + 14}">{escape(_title(row))}</text>')
        for kind, size in (("reserved", reserved), ("allocated", allocated)):
            bar = BARS_PX * size / 2**30 / most
            parts.append(
                f'<rect class="{kind}" x="{LEFT_PX}" y="{y}" width="{bar:.1f}" height="{ROW_PX - 6}"/>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _title(row: dict[str, Any]) -> str:
    """What fits before the bars."""
    name = row["program"].removeprefix("accelerate launch, ").removesuffix(", 3B")
    name = name.replace("run lora_finetune_single_device", "run, LoRA")
    return f"{name}: {row['model']}"


def clock(found: dict[str, Any]) -> str:
    """What the clock takes of the program's own processor time."""
    step, start = found["step"]["ratio"], found["start"]["ratio"]
    return (
        f"With the clock a step takes {step['middle']:.3f} times the processor time that it takes without:\n"
        f"the middle of {found['pairs']} pairs of processes, between {step['smallest']:.3f} and "
        f"{step['largest']:.3f}, for `{found['recipe']}`. The\n"
        f"start of a process takes {start['middle']:.3f} times as much.\n"
    )


_NAMED_ALIKE = (("versions", versions), ("recordings", recordings), ("times", times), ("clock", clock))
PARTS = {"recipes": ("recipes", recipes), "programs": ("programs", programs)}
PARTS |= {"examples": ("programs", examples), "compiled": ("compiled", compiled)}
PARTS |= {name: (name, write) for name, write in _NAMED_ALIKE}
"""Of the page, between comments of their names: the results that each is of."""


def _results(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"virtual_gpu_{name}.json").read_bytes())


def main(check: bool) -> None:
    parts = {name: write(_results(results)) for name, (results, write) in PARTS.items()}
    written = {PAGE: with_parts(PAGE, parts), PICTURE: picture(_results("programs"))}
    write_or_check(written, "pages.virtual_gpu", check=check)


if __name__ == "__main__":
    main("--check" in sys.argv[1:])
