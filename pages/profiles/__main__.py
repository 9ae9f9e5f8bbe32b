"""profiles/README.md from the JSON beside it: `python -m pages.profiles`. No number by hand."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_programme.import_results import EMULATED
from harness.errors import InputError
from harness.system.files import write_whole
from harness.system.locations import profiles_folder
from pages.profiles.rows import PREDICTIONS, Row, failures, how_far_off, origin, read_rows
from pages.profiles.tables import bullets, gib, ms, percent, programme_sections, ratio, section, table

HEAD = """# Profiles

Made by `python -m pages.profiles` from the JSON files in these folders, and by nothing else.
`python -m benchmarks.gpu_programme` measures, `python -m benchmarks.gpu_programme.import_results` brings the
results here, and `python -m benchmarks.predict` renews the predictions. GiB = 2^30 bytes. A ratio is a
prediction over what ran. The row of a recipe is read from `<recipe>.napkin.json`, `.simulated.json` and
`.measured.json`, or `.emulated.json` of a virtual GPU.
"""
ON_A_CPU = (
    "measured on a CPU: bytes of live tensors, and the times of a processor that does other things as well. "
    "The predictions are for the GPU they name, with its kernels, its allocator's 512-byte blocks and its "
    "speed, but without its libraries' workspaces, which a CPU has not. These rows show that the "
    "programme runs, not who is right: that takes a GPU"
)

ON_A_VIRTUAL_GPU = (
    "no GPU was there: PyTorch's CUDA build ran on a virtual GPU (harness/virtual_gpu), on "
    "which no kernel computes anything. Emulated means what PyTorch's own operators, autograd and caching "
    "allocator did, by their own statistics. Times and the memory of the CUDA context take a GPU"
)


def readme(profiles: Path) -> str:
    """The whole document. Raises InputError for a damaged file."""
    ran = [path for path in profiles.iterdir() if path.is_dir() and read_rows(path)]
    chapters = [HEAD]
    for folder in sorted(ran, key=_gpus_first):
        chapters.extend(_device(folder))
    return "\n".join(chapters if ran else [HEAD, "Nothing has been measured yet.\n"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit status 0; 1 for a stale file under --check; 2 for a damaged profile."""
    parser = argparse.ArgumentParser(prog="python -m pages.profiles", description=__doc__)
    parser.add_argument("--profiles", type=Path, default=profiles_folder())
    parser.add_argument("--check", action="store_true", help="write nothing, fail if the file is stale")
    options = parser.parse_args(arguments)
    path = options.profiles / "README.md"
    try:
        text = readme(options.profiles)
        if options.check and (not path.exists() or path.read_text() != text):
            print(f"{path} is stale: run python -m pages.profiles", file=sys.stderr)
            return 1
        if not options.check:
            write_whole(path, text)
    except InputError as error:
        print(f"pages.profiles: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def _gpus_first(path: Path) -> tuple[bool, bool, str]:
    return path.name == "cpu", path.name.startswith(EMULATED), path.name


def _device(folder: Path) -> Iterator[str]:
    rows = read_rows(folder)
    hardware = rows[0].ran.hardware
    about = list(origin(rows))
    emulated = folder.name.startswith(EMULATED)
    if hardware.kind == "cpu" or emulated:
        about.append(ON_A_VIRTUAL_GPU if emulated else ON_A_CPU)
    predicted_for = {row.profiles[s].hardware.name for row in rows for s in PREDICTIONS if s in row.profiles}
    about.append(f"predicted for: {', '.join(sorted(predicted_for)) or 'no device'}")
    yield f"## {folder.name}: {hardware.name}\n\n{bullets(about)}"
    yield section("Peak memory, GiB", _memory_table(folder.name, rows))
    if not emulated:
        yield section("Time of a step, ms", _time_table(rows))
    yield section("How far off", bullets(how_far_off(rows)) or "Nothing was predicted.\n")
    yield section("Where the estimates fail", bullets(failures(rows)) or "Nowhere beyond the bars.\n")
    yield from programme_sections(folder)


def _memory_table(folder: str, rows: Sequence[Row]) -> str:
    ran = rows[0].ran.source
    sources = (*PREDICTIONS, ran)
    head = (
        "recipe",
        "batch x tokens",
        *sources,
        "napkin ratio",
        "simulated ratio",
        f"{ran} reserved",
        "simulated ratio",
        f"{ran} process",
        "simulated ratio",
    )
    body = [
        (
            f"[{row.name}]({folder}/{row.name}.{ran}.json)",
            _tokens(row.ran.recipe),
            *(
                "out of memory" if _ran_out(row, s) else gib(row.value(s, "peak allocated"))
                for s in (*PREDICTIONS, ran)
            ),
            *(ratio(row.ratio(source, "peak allocated")) for source in PREDICTIONS),
            gib(row.value(ran, "peak reserved")),
            ratio(row.ratio("simulated", "peak reserved")),
            gib(row.value(ran, "process")),
            ratio(row.ratio("simulated", "process")),
        )
        for row in rows
    ]
    return table(head, body)


def _time_table(rows: Sequence[Row]) -> str:
    sources = (*PREDICTIONS, rows[0].ran.source)
    head = ("recipe", *sources, "napkin ratio", "simulated ratio", "tokens/s", "MFU")
    body = []
    for row in rows:
        step = row.ran.step
        body.append(
            (
                row.name,
                *(ms(row.value(source, "step time")) for source in sources),
                *(ratio(row.ratio(source, "step time")) for source in PREDICTIONS),
                "-" if step.tokens_per_s is None else f"{step.tokens_per_s:,.0f}",
                percent(step.mfu),
            )
        )
    return table(head, body)


def _ran_out(row: Row, source: str) -> bool:
    return source in row.profiles and row.profiles[source].oom is not None


def _tokens(recipe: dict[str, Any]) -> str:
    times = recipe["gradient_accumulation_steps"]
    return f"{recipe['micro_batch_size']} x {recipe['seq_len']}{f' x {times}' if times > 1 else ''}"


if __name__ == "__main__":
    sys.exit(main())
