"""README's picture: the memory of a full-size recipe over time, and its layers at the peak.

python -m pages.cover            simulate the recipe (seconds, no GPU), draw the picture, write its profile
python -m pages.cover --check    fail if the simulation says something else than the committed profile
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from harness.architecture import load_shape
from harness.report import COLOURS, drawing, read_run
from harness.report.figures import draw_timeline
from harness.report.first_words import first_words
from harness.report.run import ReportRun
from harness.step_profile import StepProfile
from harness.system import write_whole
from harness.units import in_gib

DOCS = Path(__file__).resolve().parents[1] / "docs"
PROFILE = DOCS / "data" / "cover.json"
PICTURE = DOCS / "pictures" / "cover.png"
BUILD = DOCS.parent / "build" / "docs" / "cover"
COMMAND = "harness simulate llama-3.1-8b-qlora hardware=rtx-4090 --out run"
MOST_LAYERS = 9


def sentences() -> str:
    """The first sentences of the recipe's report, from the committed profile."""
    profile = StepProfile.read(PROFILE)
    run = ReportRun("cover", profile, shape=load_shape(profile.recipe["model"]))
    return f"> {' '.join(first_words(run))}\n"


def draw(run: ReportRun) -> None:
    """The timeline, and under it the bytes of each kind of layer at the peak."""
    assert run.profile is not None
    assert run.history is not None
    figure = drawing()(figsize=(12, 9), dpi=110, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    title = f"{run.title} on an RTX 4090, one training step"
    draw_timeline(above, title, run.history, run.profile.hardware.memory_bytes)
    kinds: Counter[str] = Counter()
    for module, size in (run.profile.memory.at_peak_by_module or {}).items():
        kind = re.sub(r"\.\d+\b", ".*", module).removesuffix(".base_layer")
        kinds[re.sub(r"^base_model\.model\.(model\.)?", "", kind)] += size
    shown = kinds.most_common(MOST_LAYERS)[::-1]
    bars = below.barh([name for name, _ in shown], [size / 2**30 for _, size in shown], color=COLOURS[0])
    below.bar_label(bars, [in_gib(size) for _, size in shown], padding=4)
    below.set_title("What is alive at the peak, by layer (* is every layer of that kind)", loc="left")
    below.set_xlabel("GiB")
    below.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE)


def simulated() -> ReportRun:
    """The run of COMMAND."""
    shutil.rmtree(BUILD, ignore_errors=True)
    command = [*shlex.split(COMMAND)[:-1], str(BUILD)]
    subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL)
    return read_run(BUILD)


def main(check: bool) -> None:
    """Renew the picture and its profile, or compare the profile."""
    run = simulated()
    assert run.profile is not None
    if check:
        if StepProfile.read(PROFILE).memory != run.profile.memory:
            sys.exit("docs/data/cover.json is not what the simulation says. Run: python -m pages.cover")
        return
    draw(run)
    write_whole(PROFILE, run.profile.to_json() + "\n")


if __name__ == "__main__":
    main("--check" in sys.argv[1:])
