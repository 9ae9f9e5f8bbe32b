"""A report as one HTML file that opens from disk, with its style, its scripts (Chart.js among them) and data.

Nothing in it can reach the network, and only the scripts written here run, since the page's content security
policy names them by their hashes. Text goes in through jinja2's escaping, and data as JSON that cannot end
its element. Imports no torch.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from harness.errors import needed
from harness.report.differences import difference_tables
from harness.report.run import ReportRun
from harness.report.sections import section_of
from harness.system import write_whole
from harness.units import in_gib

SCRIPTS = ("columns.js", "timeline.js", "charts.js", "stacked.js", "overlay.js", "report.js")
"""The scripts of a report, in the order in which they run."""


def report_html(runs: Sequence[ReportRun], home: str | None = None) -> str:
    """The page of some runs: what differs between several, and a section for each. `home` is the address that
    its link back leads to; None for no link."""
    sections = [section_of(run) for run in runs]
    names = [section.name for section in sections]
    title = runs[0].title if len(names) == 1 else f"{len(names)} runs: {', '.join(names)}"
    return render_page(
        "report.html",
        title=title,
        home=home,
        data={"runs": [section.data for section in sections]},
        scripts=SCRIPTS,
        sections=sections,
        in_gib=in_gib,
        differences=difference_tables(runs),
    )


def write_report(runs: Sequence[ReportRun], out: Path) -> None:
    """Write the page of `runs` to `out`, whole or not at all. Raises InputError and MissingDependency."""
    write_whole(out, report_html(runs))


ASSETS = files("harness.report").joinpath("assets")
CHART_JS = "chart.umd.min.js"
"""Chart.js as in its npm package; its licence is beside it."""
_UNSAFE_IN_SCRIPT = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def render_page(
    template: str,
    *,
    title: str,
    data: Any,
    scripts: Sequence[str] = (),
    charts: bool = True,
    home: str | None = None,
    reaching: str = "",
    **context: Any,
) -> str:
    """The page of assets/`template`, which extends base.html.

    `data` is what the scripts see as `harness.data`, JSON with finite numbers. `scripts` are names in
    assets/, which run after page.js (sizes, themes, sortable tables) and, with `charts`, after the scripts
    that draw. `home` is the address of the link back. `reaching` is added to the page's content security
    policy, for a page that asks the server it came from. `context` is what else the template sees.

    Raises MissingDependency without jinja2.
    """
    drawing = (CHART_JS, "page.js", "drawing.js") if charts else ("page.js",)
    inlined = [_asset(name) for name in (*drawing, *scripts)]
    policy = (
        "default-src 'none'; "
        f"script-src {' '.join(_hash_source(script) for script in inlined)}; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
        f"{reaching}"
    )
    safe = _markup()
    return (
        _environment()
        .get_template(template)
        .render(
            title=title,
            home=home,
            policy=policy,
            style=safe(_asset("page.css")),
            data=safe(script_json(data)),
            scripts=[safe(script) for script in inlined],
            **context,
        )
    )


def script_json(data: Any) -> str:
    """JSON that stays inside <script>: no character that could end the element. Raises ValueError for NaN."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_UNSAFE_IN_SCRIPT)


def _hash_source(script: str) -> str:
    """The source by which a content security policy allows this script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


@cache
def _environment() -> Any:
    with needed("jinja2", None, "a report"):
        from jinja2 import Environment, PackageLoader, StrictUndefined
    environment: Any = Environment(
        loader=PackageLoader("harness.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    return environment


_WITHIN_A_PATH = re.compile(r"(?<=[./])(?=[A-Za-z*_])")
"""Where the next part of a module's or a file's path begins."""


def _breakable(text: str) -> Any:
    """Text in which paths of modules and files may be broken into lines between their parts only."""
    safe = _markup()
    return safe("<wbr>").join(map(safe.escape, _WITHIN_A_PATH.split(text)))


def _markup() -> Any:
    _environment()
    from markupsafe import Markup

    return Markup


@cache
def _asset(name: str) -> str:
    text = ASSETS.joinpath(name).read_text(encoding="utf-8")
    text = text.partition("\n//# sourceMappingURL=")[0]  # which a browser would fetch from the network
    # a browser's parser normalizes the ends of lines before it hashes a script
    return text.replace("\r\n", "\n").replace("\r", "\n")
