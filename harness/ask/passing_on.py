"""An answer to pass on: a picture, a table for an issue or a model card, a badge."""

from __future__ import annotations

from html import escape
from textwrap import wrap
from typing import Any
from urllib.parse import quote

COLOURS = (
    "#0072B2",
    "#E69F00",
    "#CC79A7",
    "#D55E00",
    "#56B4E9",
    "#009E73",
    "#999999",
    "#F0E442",
    "#882255",
    "#BBBBBB",
)
"""Okabe and Ito's, and two more, as the report has them (harness/report/assets/page.js)."""
VERDICTS = {"yes": ("fits", "2da44e"), "tight": ("tight", "bf8700"), "no": ("does not fit", "cf222e")}
WIDTH, LEFT = 800, 24


def markdown(answer: dict[str, Any]) -> str:
    """A table with the verdict above it."""
    rows = [
        ("", ""),
        ("---", "---"),
        *((row["name"], f"{row['value']} ({row['detail']})") for row in answer["rows"]),
    ]
    rows += [(part["name"], part["shown"]) for part in answer["bar"]["parts"]]
    table = "\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in rows)
    head = f"**{answer['name']} on {answer['device']}**: {answer['verdict']}"
    return f"{head}\n\n{table}\n\n`{answer['command']}` ({answer['from']})\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def badge(answer: dict[str, Any]) -> str:
    """A line of Markdown with a badge, drawn by shields.io for whoever opens it."""
    word, colour = VERDICTS[answer["fits"]]
    left, right = (
        quote(text.replace("-", "--").replace("_", "__"), safe="") for text in (answer["device"], word)
    )
    return f"![{answer['name']} on {answer['device']}: {word}](https://img.shields.io/badge/{left}-{right}-{colour})"


def svg(answer: dict[str, Any]) -> str:
    """A picture, 800 units wide: verdict, bar, legend, rows."""
    bar, (_, verdict_colour) = answer["bar"], VERDICTS[answer["fits"]]
    parts: list[dict[str, Any]] = bar["parts"]
    scale = (WIDTH - 2 * LEFT) / max(bar["memory_bytes"], sum(part["bytes"] for part in parts), 1)
    out = [_text(LEFT, 36, f"{answer['name']} on {answer['device']}", 20, 600)]
    lines = wrap(answer["verdict"], 92)
    out += [_text(LEFT, 62 + 20 * n, line, 15, 400, f"#{verdict_colour}") for n, line in enumerate(lines)]
    x, y = float(LEFT), 58 + 20 * len(lines)
    for n, part in enumerate(parts):
        out.append(_rectangle(x, y, part["bytes"] * scale, 36, f'fill="{COLOURS[n % len(COLOURS)]}"'))
        x += part["bytes"] * scale
    limit = 'fill="none" stroke="#57606a" stroke-width="2"'
    out.append(_rectangle(LEFT, y, bar["memory_bytes"] * scale, 36, limit))
    y += 62
    for n, part in enumerate(parts):
        left, line = LEFT + n % 3 * 250, y + n // 3 * 22
        out.append(_rectangle(left, line - 11, 12, 12, f'fill="{COLOURS[n % len(COLOURS)]}"'))
        out.append(_text(left + 18, line, f"{part['name']} {part['shown']}", 13))
    y += 22 * ((len(parts) + 2) // 3) + 12
    for row in answer["rows"]:
        out.append(_text(LEFT, y, f"{row['name']}: {row['value']} ({row['detail']})", 13))
        y += 22
    for line in (*wrap(answer["command"], 110), answer["from"]):
        out.append(_text(LEFT, y, line, 12, 400, "#57606a"))
        y += 18
    size = f'width="{WIDTH}" height="{y}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {y}" '
        f'font-family="system-ui, sans-serif"><rect {size} fill="#ffffff"/>{"".join(out)}</svg>'
    )


def _rectangle(x: float, y: float, width: float, height: int, look: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height}" {look}/>'


def _text(x: float, y: float, text: str, size: int, weight: int = 400, colour: str = "#1b1f23") -> str:
    look = f'font-size="{size}" font-weight="{weight}" fill="{colour}"'
    return f'<text x="{x:g}" y="{y:g}" {look}>{escape(text)}</text>'
