"""What napkin and the simulation say about measured recipes: `python -m benchmarks.predict profiles/h200`.

Writes <recipe>.napkin.json and <recipe>.simulated.json beside every <recipe>.measured.json or .emulated.json,
for the device that the folder is named after, with its calibration and the allocator settings of that run.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.command import parser_of
from benchmarks.gpu_programme.import_results import EMULATED, sanitised
from benchmarks.gpu_programme.tasks import Context
from harness.allocator.settings import Settings, settings_from_environment
from harness.errors import InputError
from harness.hardware.hardware import DEFAULT_HARDWARE, Calibration, Hardware, find_hardware, hardware_names
from harness.recipe.check import check_recipe
from harness.recipe.recipe import Recipe
from harness.step_profile.step_profile import StepProfile
from harness.system.files import write_whole
from harness.system.streams import quiet_libraries

MAX_STACK_LINES = 16


def predictions(
    recipe: Recipe, hardware: Hardware, settings: Settings, only: str = ""
) -> dict[str, StepProfile | Exception]:
    """The profile of each source, or of one, or what stopped it: one of them failing leaves the other."""
    found: dict[str, StepProfile | Exception] = {}
    for source, answer in (("napkin", _napkin), ("simulated", _simulated)):
        if only not in ("", source):
            continue
        try:
            found[source] = answer(recipe, hardware, settings)
        except Exception as error:
            found[source] = error
    return found


def _napkin(recipe: Recipe, hardware: Hardware, settings: Settings) -> StepProfile:
    from harness.napkin import prediction as napkin

    return napkin.predict(recipe, hardware)


def _simulated(recipe: Recipe, hardware: Hardware, settings: Settings) -> StepProfile:
    from harness.simulate.simulated_run import simulate

    return simulate(recipe, hardware, settings)[0]


def as_document(profile: StepProfile) -> dict[str, Any]:
    """A profile as plain data, with the innermost lines of its stacks."""
    document: dict[str, Any] = profile.model_dump(mode="json")
    for allocation in (*document["top"], *((document["oom"] or {}).get("top") or ())):
        del allocation["stack"][MAX_STACK_LINES:]
    return document


def settings_here() -> Settings:
    """The allocator settings of this process's environment, with this PyTorch's order of free blocks."""
    import torch

    return settings_from_environment(os.environ, torch.__version__)


def hardware_here(context: Context) -> Hardware:
    """This machine's GPU as the table has it, calibrated by this very programme if that part has run.

    On a CPU see `without_workspaces`.
    """
    if context.device == "cpu":
        return without_workspaces()
    from benchmarks.gpu_programme.calibrate import calibration_of

    name = table_name()
    if name is None:
        raise InputError(
            "this GPU is not in the table of harness.hardware.hardware, so nothing is predicted for it."
        )
    hardware = find_hardware(name)
    measured = context.out / "calibrate.json"
    if not measured.exists():
        return hardware
    results = json.loads(measured.read_bytes())["results"]
    fields = calibration_of(results, name, f"measured on this {name}", of_host=True)
    return replace(hardware, calibration=Calibration(**fields))


def without_workspaces() -> Hardware:
    """The default device of the table, calibrated for what a CPU measures: predictions are about GPUs, and
    their libraries' workspaces are larger than the small models that a CPU trains.
    """
    calibration = Calibration(source="nothing measured; no library workspaces", cublas_workspace_bytes=0)
    return replace(find_hardware(DEFAULT_HARDWARE), calibration=calibration)


def simulation_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Of a recording's environment variables those that the simulation reads: which kernels run, and whether
    NCCL's watchdog does."""
    names = ("TORCH_CUDNN_SDPA_DEPRIORITIZED", "TORCH_DISABLE_NATIVE_JIT", "TORCH_NCCL_BLOCKING_WAIT")
    return {name: environment[name] for name in names if name in environment}


def table_name() -> str | None:
    """The hardware table's name for this machine's GPU, from the driver; None if it is not in the table, or
    there is none."""
    import pynvml

    from harness.hardware.table import TABLE_NAMES

    try:
        pynvml.nvmlInit()
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    except pynvml.NVMLError:  # no such library in this container
        import torch

        if not torch.cuda.is_available():
            return None
        name = torch.cuda.get_device_name()
    return TABLE_NAMES.get(name if isinstance(name, str) else name.decode())


def predict_folder(folder: Path, only: Sequence[str] = (), source: str = "") -> list[Path]:
    """Write the predictions for a folder's measured profiles, of one source alone if it is named. Returns the
    files. Raises InputError."""
    ran = sorted([*folder.glob("*.measured.json"), *folder.glob("*.emulated.json")])
    if not ran:
        raise InputError(
            f"{folder} holds no measured profile. Import some: "
            "python -m benchmarks.gpu_programme.import_results."
        )
    device = folder.name.removeprefix(EMULATED)
    hardware = find_hardware(device) if device in hardware_names() else without_workspaces()
    written = []
    for path in ran:
        name = path.name.removesuffix(".json").rpartition(".")[0]
        if only and name not in only:
            continue
        profile = StepProfile.read(path)
        environment = profile.provenance.get("settings") or {}
        version = (profile.provenance.get("versions") or {}).get("torch", "2.13")
        recipe = check_recipe(profile.recipe, str(path))
        settings = settings_from_environment(environment, version)
        with patch.dict(os.environ, simulation_settings(environment)):
            answers = predictions(recipe, hardware, settings, source)
        for answered_by, answer in answers.items():
            target = folder / f"{name}.{answered_by}.json"
            if isinstance(answer, Exception):
                target.unlink(missing_ok=True)
                print(f"{name}: {answered_by}: {type(answer).__name__}: {answer}", flush=True)
            else:
                write_whole(target, json.dumps(sanitised(as_document(answer)), indent=1) + "\n")
                written.append(target)
                print(f"{target}", flush=True)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit status 0, or 2 for bad input."""
    parser = parser_of("benchmarks.predict", __doc__)
    parser.add_argument("folder", type=Path, help="profiles/<device>")
    parser.add_argument("--only", action="append", default=[], metavar="RECIPE", help="only this recipe")
    parser.add_argument("--source", default="", choices=("napkin", "simulated"), help="only this answer")
    options = parser.parse_args(arguments)
    quiet_libraries()
    try:
        predict_folder(options.folder, options.only, options.source)
    except InputError as error:
        print(f"benchmarks.predict: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
