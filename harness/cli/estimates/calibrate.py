"""`harness calibrate`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.arguments import AsJson
from harness.cli.terminal.lines import tell
from harness.errors import InputError
from harness.system import make_folder, write_whole

EXAMPLES = """
Examples:
  harness calibrate --trace trace.json
  harness calibrate --trace trace.json --hardware rtx-4090 --out my-profiles
"""


def calibrate(
    trace: Annotated[
        Path, typer.Option(help="A trace that torch.profiler recorded on the GPU, with record_shapes=True.")
    ],
    hardware: Annotated[
        str | None, typer.Option(help="Its name in the hardware table, where the trace does not say.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write <device>/calibration.json to; without it nothing is written."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Adjust the estimates of time to one's own GPU, by a trace that it recorded: before and after."""
    from harness.hardware import TABLE_NAMES, find_hardware
    from harness.kernel_time import adjust, read_trace

    recorded = read_trace(trace)
    recorded_on = TABLE_NAMES.get(recorded.device or "")
    name = hardware or recorded_on
    if recorded_on and hardware and hardware.lower() != recorded_on:
        raise InputError(
            f"{trace} was recorded on {recorded.device}, which is {recorded_on} in the table, not {hardware}."
        )
    if name is None:
        named = f"calls its device {recorded.device}" if recorded.device else "does not name its device"
        raise InputError(f"{trace} {named}. Say which of the table it is: --hardware NAME.")
    device, adjusted = adjust(recorded, find_hardware(name))
    calibration = device.calibration.model_copy(update={"source": f"a trace of {recorded.device or name}"})
    fields = calibration.model_dump(mode="json", exclude_defaults=True)
    if as_json:
        print(json.dumps({"adjusted": [asdict(kind) for kind in adjusted], "calibration": fields}, indent=1))
    else:
        tell(f"{name}, from {len(recorded.seen):,} operators of {trace}\n")
        tell(
            f"  {'kernels':<12}{'operators':>10}{'measured / estimated':>22}{'error before':>14}{'after':>9}"
        )
        for kind in adjusted:
            line = f"  {kind.kind:<12}{kind.count:>10,}{kind.scale:>22.3f}"
            tell(line + f"{kind.before:>14.1%}{kind.after:>9.1%}")
    if out is not None:
        make_folder(out / name)
        path = out / name / "calibration.json"
        write_whole(path, json.dumps(fields, indent=1) + "\n")
        tell(f"\nwritten: {path}", stderr=as_json)
