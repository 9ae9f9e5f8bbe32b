"""The tables of docs/causal-models.md, from what these commands write:

    python -m benchmarks.causal_models --out profiles/cpu/causal_models.json
    python -m benchmarks.causal_models --methods --out profiles/cpu/methods.json
    python -m benchmarks.causal_models --vision --out profiles/cpu/vision_models.json

python -m pages.causal_models            write them
python -m pages.causal_models --check    fail if they are not so
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from benchmarks.causal_models.steps import MORE_METHODS
from benchmarks.causal_models.vision import VISION_METHODS
from harness.recipe import shown
from harness.report.table import markdown_table
from harness.units import in_gib
from pages.parts import ROOT, with_parts, write_or_check

PAGE = ROOT / "docs" / "causal-models.md"
RESULTS = ROOT / "profiles" / "cpu"
Row = dict[str, Any]


def trains(row: Row) -> bool:
    """Whether the step runs on the CPU."""
    return "builds" not in row and "trains" not in row


def same(row: Row) -> bool:
    """Whether simulated and emulated peak are the same to the byte."""
    return isinstance(row.get("simulated"), dict) and row["apart"]["allocated"] == 0


def parts(found: dict[str, Any]) -> dict[str, str]:
    """The tables, by the name of their place."""
    rows = found["rows"]
    trained = [row for row in rows if trains(row)]
    others = [row for row in trained if not same(row)]
    refused = [row for row in rows if not trains(row)]
    return {
        "counts": _counts(rows, found),
        "others": _table(("type", "recipe", "why"), ((row, _why(row)) for row in others)),
        "refused": _table(("type", "recipe", "why"), ((row, _reason(row)) for row in refused)),
        "same": f"{_names(row for row in trained if same(row))}.\n",
    }


def _counts(rows: list[Row], found: dict[str, Any]) -> str:
    head = ("recipe", "types", "train on the CPU", "same peak, to the byte", "and every request", "reserved")
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        of_method = [row for row in rows if row["method"] == method]
        trained = [row for row in of_method if trains(row)]
        right = [row for row in trained if same(row)]
        share = len(right) / len(trained)
        lines.append(
            (
                method,
                str(len(of_method)),
                str(len(trained)),
                f"{len(right)} ({share:.1%})",
                str(sum(row["same_requests"] for row in right)),
                str(sum(row["apart"]["reserved"] == 0 for row in right)),
            )
        )
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"{markdown_table(head, lines, range(1, len(head)))}\nWith {versions}; on {found['gpu']}.\n"


def _methods(found: dict[str, Any]) -> str:
    head = ("method", "fields of the recipe", "model", "peak, emulated", "simulated", "every request")
    lines = []
    for row in found["rows"]:
        fields = " ".join(f"{name}={shown(value)}" for name, value in MORE_METHODS[row["method"]].items())
        begun = (row["method"], f"`{fields}`", row["type"])
        if trains(row) and isinstance(row.get("simulated"), dict):
            apart = row["apart"]["allocated"]
            told = "the same" if not apart else f"{apart:+,} bytes"
            peak = in_gib(row["emulated"]["allocated"])
            lines.append((*begun, peak, told, "yes" if row["same_requests"] else "no"))
        else:
            lines.append(
                (*begun, (_reason(row) if not trains(row) else _why(row)).replace("|", "\\|"), "", "")
            )
    return markdown_table(head, lines, ()) + "\n"


def _vision(found: dict[str, Any]) -> str:
    """A line for each type, with what the simulation said of each way to train it."""
    rows = {(row["type"], row["method"]): row for row in found["rows"]}
    lines = [
        (f"`{kind}`", *(_told(rows[kind, method]) for method in VISION_METHODS))
        for kind in dict.fromkeys(row["type"] for row in found["rows"])
    ]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"{markdown_table(('type', *VISION_METHODS), lines, ())}\nWith {versions}; on {found['gpu']}.\n"


def _told(row: Row) -> str:
    if not trains(row):
        return _reason(row).replace("|", "\\|")
    return "the same" if same(row) else _why(row).replace("|", "\\|")


def _table(head: tuple[str, ...], rows: Iterable[tuple[Row, str]]) -> str:
    """A line for each reason of each type."""
    methods: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row, why in rows:
        methods[row["type"], why].append(row["method"])
    lines = [(f"`{kind}`", ", ".join(of), why.replace("|", "\\|")) for (kind, why), of in methods.items()]
    return markdown_table(head, lines, ()) + "\n"


def _reason(row: Row) -> str:
    return row.get("builds") or row["trains"]


def _why(row: Row) -> str:
    for where in ("emulated", "simulated"):
        if isinstance(row.get(where), str):
            return row[where]
    return f"{row['apart']['allocated']:+,} bytes of {row['emulated']['allocated']:,}"


def _names(rows: Iterable[Row]) -> str:
    methods: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        methods[row["type"]].append(row["method"])
    whole = max(len(of) for of in methods.values())
    return ", ".join(
        f"`{kind}`" + ("" if len(of) == whole else f" ({of[0]} alone)") for kind, of in methods.items()
    )


def main() -> None:
    """See the module's docstring."""
    found = parts(json.loads((RESULTS / "causal_models.json").read_bytes()))
    methods = {"methods": _methods(json.loads((RESULTS / "methods.json").read_bytes()))}
    vision = {"vision": _vision(json.loads((RESULTS / "vision_models.json").read_bytes()))}
    text = with_parts(PAGE, found | methods | vision)
    write_or_check({PAGE: text}, "pages.causal_models", check="--check" in sys.argv[1:])


if __name__ == "__main__":
    main()
