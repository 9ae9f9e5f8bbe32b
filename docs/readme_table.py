"""Keeps README's table equal to a committed profile.

python docs/readme_table.py               write the table from profiles/cpu/smoke.measured.json
python docs/readme_table.py RUN_FOLDER    first take that run's profile as the committed one
"""

from __future__ import annotations

import sys
from pathlib import Path

from harness.console import in_gib, in_ms
from harness.files import write_whole
from harness.step_profile import CATEGORIES, PHASES, StepProfile

ROOT = Path(__file__).resolve().parents[1]
PROFILE = ROOT / "profiles" / "cpu" / "smoke.measured.json"
BEGIN, END = "<!-- table: written by docs/readme_table.py -->\n", "<!-- end of table -->\n"


def table(profile: StepProfile) -> str:
    """Markdown: bytes at the peak by category, then time by phase."""
    rows = [("memory at the peak", "measured"), ("---", "---:")]
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
    return "".join(f"| {left} | {right} |\n" for left, right in rows)


def with_table(readme: str, profile: StepProfile) -> str:
    """`readme` with the text between the markers replaced."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{table(profile)}{END}{after}"


def adopt(run_folder: Path) -> None:
    """Commit a run's profile: its data file named from the checkout's root, as on any machine."""
    profile = StepProfile.read(run_folder / "profile.json")
    profile.recipe["data"] = str(Path(profile.recipe["data"]).relative_to(ROOT))
    write_whole(PROFILE, profile.to_json() + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        adopt(Path(sys.argv[1]))
    readme = ROOT / "README.md"
    write_whole(readme, with_table(readme.read_text(), StepProfile.read(PROFILE)))
