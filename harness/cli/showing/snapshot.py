"""`harness snapshot`: what a memory snapshot says, what differs between two, what leaks; and as JSON."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.arguments import AsJson, paragraphs
from harness.cli.terminal.lines import tell
from harness.cli.terminal.terminal import Terminal
from harness.errors import InputError
from harness.system import read_whole, write_whole

EXAMPLES = """
Examples:
  harness snapshot to-json run/snapshot.pickle --out snapshot.json
"""
SHOW_EXAMPLES = """
Examples:
  harness snapshot show oom.pickle
  harness snapshot show two-gpus.pickle --device 1
  harness snapshot show --message training.log
"""
MOST_OF_A_LOG = 2**28
"""The most bytes of a log that are searched for PyTorch's message."""
DIFF_EXAMPLES = """
Examples:
  harness snapshot diff before.pickle after.pickle
  harness snapshot diff before.pickle after.pickle --at-peak --json
"""
LEAKS_EXAMPLES = """
Example:
  harness snapshot leaks snapshot.pickle
"""

_FILE = typer.Argument(
    metavar="FILE", help="A snapshot (pickle or JSON), of harness or of torch; from anyone. Or a run folder."
)
SnapshotFile = Annotated[Path, _FILE]
OfDevice = Annotated[
    int | None,
    typer.Option(
        "--device",
        help="Of several devices, the one to look at. Default: one that ran out of memory, or did the most.",
    ),
]

app = typer.Typer(help="Read memory snapshots: what fills the memory, what differs, what leaks; as JSON.")


@app.command("show", epilog=paragraphs(SHOW_EXAMPLES))
def show(
    file: Annotated[Path | None, _FILE] = None,
    device: OfDevice = None,
    message: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|-", help="Instead of a snapshot, what PyTorch printed: a log, or - for stdin."
        ),
    ] = None,
) -> None:
    """Say in the terminal what `harness report` shows: why memory ran out, or the peak; who holds what."""
    if (file is None) == (message is None):
        raise InputError("give a snapshot, or --message FILE (- for stdin) with what PyTorch printed.")
    if message is not None:
        _show_message(message, device)
        return
    assert file is not None
    from harness.cli.terminal.snapshots import print_snapshot
    from harness.report import read_run, section_of

    print_snapshot(Terminal(), section_of(read_run(file, device)))


def _show_message(path: Path, device: int | None) -> None:
    """Say in words what PyTorch's message of an error says. Raises InputError where there is none."""
    from harness.snapshot import message_in_words, read_message

    if device is not None:
        raise InputError("--device belongs to a snapshot: a message is of one device.")
    try:
        text = sys.stdin.buffer.read(MOST_OF_A_LOG) if str(path) == "-" else read_whole(path, MOST_OF_A_LOG)
    except OSError as error:
        raise InputError(f"--message {path}: {error.strerror}. Give a log, or - for stdin.") from None
    try:
        sentences = message_in_words(read_message(text.decode(errors="replace")))
    except InputError as error:
        raise InputError(f"--message {path}: {error}") from None
    tell("\n".join(sentences))


@app.command("diff", epilog=paragraphs(DIFF_EXAMPLES))
def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="The snapshot to compare with.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The snapshot to compare.")],
    device: OfDevice = None,
    at_peak: Annotated[
        bool,
        typer.Option(
            "--at-peak",
            help="Compare at the peaks. Default: where memory ran out, else when the snapshots were taken.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What B holds that A does not: new, gone, grown and shrunk, by category and by the stack that asked."""
    from harness.api import load_snapshot
    from harness.snapshot import diff_held, held_at, recording_of

    recordings = [recording_of(load_snapshot(path), device) for path in (before, after)]
    held = [held_at(recording, recording.peak if at_peak else recording.moment) for recording in recordings]
    found = diff_held(*held)
    if as_json:
        print(json.dumps(found.as_json(), indent=1))
        return
    from harness.cli.terminal.snapshots import print_held_diff

    when = [
        "at the peak" if at_peak else "where memory ran out" if recording.oom else "when it was taken"
        for recording in recordings
    ]
    print_held_diff(Terminal(), found, (f"{before} {when[0]}", f"{after} {when[1]}"))


@app.command("leaks", epilog=paragraphs(LEAKS_EXAMPLES))
def leaks(file: SnapshotFile, device: OfDevice = None, as_json: AsJson = False) -> None:
    """What holds more memory at the end of each step, by the stack that asked for it.

    Steps are those that the recording marks; else an optimizer in the stacks says where they end.
    """
    from harness.api import load_snapshot
    from harness.snapshot import find_leaks, recording_of

    snapshot = load_snapshot(file)
    found = find_leaks(recording_of(snapshot, device), snapshot.get("external_annotations"))
    if as_json:
        print(json.dumps(found.as_json(), indent=1))
        return
    from harness.cli.terminal.snapshots import print_leaks

    print_leaks(Terminal(), found)


@app.command("to-json", epilog=paragraphs(EXAMPLES))
def to_json(
    file: SnapshotFile,
    out: Annotated[Path | None, typer.Option(help="The file to write. Default: stdout.")] = None,
) -> None:
    """Write a snapshot as JSON, which every command that reads a snapshot takes too.

    The pickle is read as plain data: nothing in it runs, whoever made it.
    """
    from harness.api import load_snapshot
    from harness.snapshot import snapshot_to_json

    text = snapshot_to_json(load_snapshot(file))
    if out is None:
        sys.stdout.write(text)
    else:
        write_whole(out, text)
