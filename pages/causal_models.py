"""The tables of docs/causal-models.md, from profiles/cpu/causal_models.json, which this command writes:

    python -m benchmarks.causal_models --out profiles/cpu/causal_models.json

python -m pages.causal_models            write them
python -m pages.causal_models --check    fail if they are not so
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from harness.report.table import markdown_table
from pages.parts import ROOT, with_parts, write_or_check

PAGE = ROOT / "docs" / "causal-models.md"
RESULTS = ROOT / "profiles" / "cpu" / "causal_models.json"
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
    text = with_parts(PAGE, parts(json.loads(RESULTS.read_bytes())))
    write_or_check({PAGE: text}, "pages.causal_models", check="--check" in sys.argv[1:])


if __name__ == "__main__":
    main()
