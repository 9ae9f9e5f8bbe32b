"""Bring what the hardware programme wrote into the repository.

`python -m benchmarks.gpu_programme.import_results DIR` writes

    validate, predict   profiles/<device>/<recipe>.<source>.json
    calibrate           profiles/<device>/calibration.json, for a device of the hardware table: what is so of
                        any such card, and with --host what belongs to the machine around it
    traces              tests/recordings/traces/<name>.json.gz, from a GPU only
    every part          profiles/<device>/programme/<part>.json: what ran, what was skipped, what failed

What ran on a virtual GPU (harness emulate) is emulated: it goes to profiles/emulated-<device> and to
tests/recordings/virtual_gpu/<device>, without its times, and calibrates nothing.

Everything is checked before anything is written. Paths of the machine are cut to what means the same
elsewhere. A piece that was run again replaces what it left before; one that was not run does not.
"""

import base64
import binascii
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from benchmarks.command import parser_of
from benchmarks.gpu_programme.__main__ import FORMAT, PARTS, VERSION
from benchmarks.gpu_programme.calibrate import calibration_of
from benchmarks.gpu_programme.trace_file import decode_trace, encode_trace
from harness.errors import InputError
from harness.hardware.hardware import Calibration, hardware_names
from harness.step_profile.step_profile import StepProfile
from harness.system.files import write_whole
from harness.system.locations import profiles_folder

MAX_FILE_BYTES = 2**26
STATUSES = ("ok", "oom", "skipped", "error", "died", "timeout", "not run")
NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,79}")
HEAVY = {"traces": ("trace",), "validate": ("profile",), "predict": ("profiles",)}
"""Fields that go into files of their own."""


EMULATED = "emulated-"
"""Before the name of a device, in the name of a folder: no such device was there."""


@dataclass(frozen=True)
class Imported:
    """What would be written, by path; and what is left out, in words."""

    files: dict[Path, bytes]
    notes: list[str]


def read_results(folder: Path, commit: str | None = None) -> dict[str, dict[str, Any]]:
    """The programme's files in `folder` by part, sanitised.

    `commit` fills in where the machine had no repository to ask. Raises InputError naming the file that
    is not the programme's, is damaged, or is of another device than the rest.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise InputError(
            f"{folder} holds no result: python -m benchmarks.gpu_programme --out {folder} writes some."
        )
    documents = {}
    for path in paths:
        document = _checked(path)
        try:
            documents[document["part"]] = sanitised(_with_commit(document, commit))
        except RecursionError:
            raise InputError(f"{path} nests too deep.") from None
    devices = {document["device"]["name"] for document in documents.values()}
    if len(devices) > 1:
        raise InputError(f"{folder} mixes results of {', '.join(sorted(devices))}. Import one at a time.")
    return documents


def files_of(
    documents: Mapping[str, Mapping[str, Any]], profiles: Path, traces: Path, *, of_host: bool = False
) -> Imported:
    """The files that `documents` become. With `of_host` the calibration has what belongs to the machine
    around the card too. Raises InputError for a damaged profile, trace or calibration."""
    files: dict[Path, bytes] = {}
    notes: list[str] = []
    for part, document in documents.items():
        device, emulated = document["device"], emulated_device(document)
        folder = profiles / (folder_name(device) if emulated is None else f"{EMULATED}{emulated}")
        kept = traces if emulated is None else traces.parent / "virtual_gpu" / emulated
        for result in document["results"]:
            made = result.get("result") or {}
            # a small model's numbers never stand under a large model's name
            name = f"tiny-{result['name']}" if document.get("tiny") else result["name"]
            where = f"{part}.json: {name}"
            if part == "validate" and "profile" in made:
                source, ran = "measured", made["profile"]
                if emulated is not None:
                    source, ran = "emulated", without_times(made["profile"])
                files[folder / f"{name}.{source}.json"] = _profile(ran, source, where)
            if part == "predict":
                for source, profile in (made.get("profiles") or {}).items():
                    files[folder / f"{name}.{source}.json"] = _profile(profile, source, where)
            if part == "traces" and "trace" in made and device["kind"] == "cuda":
                files[kept / f"{name}.json.gz"] = sanitised_trace(made["trace"], where)
        if part == "traces" and device["kind"] != "cuda":
            notes.append("traces: left out, those of a CPU say nothing about the CUDA allocator")
        if part == "calibrate" and emulated is None:
            if device.get("table_name") in hardware_names():
                files[folder / "calibration.json"] = _calibration(document, of_host)
            else:
                notes.append(f"calibrate: {device['name']} is not in the hardware table, so nothing reads it")
        if emulated is None:  # the rest of what an emulated programme says is about time
            path = folder / "programme" / f"{part}.json"
            files[path] = _as_json(_merged(path, _light(part, document)))
    return Imported(files, notes)


def folder_name(device: Mapping[str, Any]) -> str:
    """profiles/<this>: the hardware table's name, cpu, or the driver's name spelled as a file name."""
    if device["kind"] == "cpu":
        return "cpu"
    if device.get("table_name") in hardware_names():
        return device["table_name"]
    return re.sub(r"[^a-z0-9]+", "-", device["name"].lower()).strip("-") or "unnamed"


def emulated_device(document: Mapping[str, Any]) -> str | None:
    """The hardware table's name of the virtual GPU that it ran on, None for a real one."""
    settings = document["provenance"].get("settings") or {}
    return settings.get("VIRTUAL_GPU") or settings.get("STAND_IN_CUDA")


def without_times(document: dict[str, Any]) -> dict[str, Any]:
    """A profile recorded on a virtual GPU, which computes nothing: no times, no losses."""
    nothing = {"median": None, "p10": None, "p90": None, "n": 0}
    phases = {name: phase | {"time_s": nothing} for name, phase in document["phases"].items()}
    step = {"time_s": nothing, "model_flops": document["step"].get("model_flops")}
    return document | {"source": "emulated", "phases": phases, "step": step}


def sanitised(value: Any) -> Any:
    """`value` (plain data) with machine paths cut to their package or last part, and no kernel build."""
    if isinstance(value, dict):
        # a trace is base64, where a / means nothing
        special = {"platform": _platform, "trace": lambda text: text}
        return {key: special.get(key, sanitised)(item) for key, item in value.items()}
    if isinstance(value, list):
        return [sanitised(item) for item in value]
    return _without_paths(value) if isinstance(value, str) else value


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit status 0, or 2 for a folder that is not the programme's."""
    root = Path(__file__).resolve().parents[2]
    parser = parser_of("benchmarks.gpu_programme.import_results", __doc__)
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="what benchmarks.gpu_programme wrote to --out"
    )
    parser.add_argument("--commit", help="the commit that ran, where the machine had no repository")
    parser.add_argument(
        "--host",
        action="store_true",
        help="calibrate also what belongs to the machine around the card: for one's own machine",
    )
    parser.add_argument("--profiles", type=Path, default=profiles_folder())
    parser.add_argument("--traces", type=Path, default=root / "tests" / "recordings" / "traces")
    options = parser.parse_args(arguments)
    try:
        documents = read_results(options.folder, options.commit)
        imported = files_of(documents, options.profiles, options.traces, of_host=options.host)
        for path, content in imported.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
            print(path)
    except InputError as error:
        print(f"benchmarks.gpu_programme.import_results: {error}", file=sys.stderr)
        return error.exit_status
    for note in imported.notes:
        print(note)
    return 0


def _checked(path: Path) -> dict[str, Any]:
    """The document in `path`. Raises InputError unless it is of the programme's shape."""
    refuse = f"{path} is not a file that python -m benchmarks.gpu_programme wrote"
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{refuse}: it has more than {MAX_FILE_BYTES} bytes.")
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{refuse}: no JSON ({error}).") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InputError(f"{refuse}: it does not say format: {FORMAT}. Move it away.")
    if document.get("version") != VERSION:
        raise InputError(f"{path} is of version {document.get('version')}; this program reads {VERSION}.")
    device = document.get("device")
    problems = {
        f"part is {document.get('part')!r}": document.get("part") not in PARTS,
        "it is called after another part": document.get("part") != path.stem,
        "no device": not isinstance(device, dict) or not isinstance(device.get("name"), str),
        "no kind of device": not isinstance(device, dict) or device.get("kind") not in ("cuda", "cpu"),
        "no provenance": not isinstance(document.get("provenance"), dict),
        "no results": not isinstance(document.get("results"), list),
    }
    for problem, is_so in problems.items():
        if is_so:
            raise InputError(f"{refuse}: {problem}.")
    for result in document["results"]:
        if not isinstance(result, dict) or result.get("status") not in STATUSES:
            raise InputError(f"{refuse}: a result without a known status.")
        if not isinstance(result.get("name"), str) or not NAME.fullmatch(result["name"]):
            raise InputError(f"{refuse}: a result called {result.get('name')!r:.100}.")
        if not isinstance(result.get("result", {}), dict):
            raise InputError(f"{refuse}: {result['name']} has a result that is no object.")
    return document


def _with_commit(document: dict[str, Any], commit: str | None) -> dict[str, Any]:
    if commit is None:
        return document

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            filled = {key: fill(item) for key, item in value.items()}
            return filled | {"git_commit": commit} if filled.get("git_commit", commit) is None else filled
        return [fill(item) for item in value] if isinstance(value, list) else value

    return fill(document)


def _profile(document: Any, source: str, where: str) -> bytes:
    profile = StepProfile.from_json(json.dumps(document), where)
    if profile.source != source:
        raise InputError(f"{where}: the profile says source: {profile.source}, not {source}.")
    return f"{profile.to_json()}\n".encode()


def sanitised_trace(text: Any, where: str) -> bytes:
    """The bytes of a trace in base64, without this machine's paths. Raises InputError if it is damaged."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise InputError(f"{where}: the trace is not base64 ({error}).") from None
    trace = decode_trace(data, where)
    return encode_trace(
        replace(
            trace,
            recipe_fields=sanitised(trace.recipe_fields),
            provenance=sanitised(trace.provenance),
            oom=sanitised(trace.oom),
        )
    )


def _calibration(document: Mapping[str, Any], of_host: bool) -> bytes:
    device, versions = document["device"], document["provenance"].get("versions") or {}
    source = (
        "kernels as published measurements have them, context and host link as measured on "
        f"{device['name']} (driver {device.get('driver')}, torch {versions.get('torch')}), "
        f"{document.get('started')}: programme/calibrate.json"
    )
    try:
        fields = calibration_of(document["results"], device["table_name"], source, of_host=of_host)
        Calibration.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"calibrate.json: {'.'.join(map(str, first['loc']))}: {first['msg']}.") from None
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise InputError(f"calibrate.json: a measurement is damaged ({error!r}).") from None
    return _as_json(fields)


def _light(part: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """The document without what has files of its own; each result says when and by which commit."""
    origin = {"started": document.get("started"), "git_commit": document["provenance"].get("git_commit")}
    apart = HEAVY.get(part, ())
    results = []
    for result in document["results"]:
        made = {key: value for key, value in (result.get("result") or {}).items() if key not in apart}
        results.append({**result, **({"result": made} if "result" in result else {}), **origin})
    return {**document, "results": results}


def _merged(path: Path, document: dict[str, Any]) -> dict[str, Any]:
    """`document` with the results that were there before and are not replaced, by name."""
    before = json.loads(path.read_bytes())["results"] if path.exists() else []
    results = {result["name"]: result for result in before}
    for result in document["results"]:
        if result["status"] != "not run" or result["name"] not in results:
            results[result["name"]] = result
    return {**document, "results": [results[name] for name in sorted(results)]}


_BEFORE_PACKAGE = re.compile(r"/[^\s\"']*?/(?:(?:site-packages|dist-packages|python3\.\d+)/)+")
_BEFORE_HERE = re.compile(r"/(?:[^\s\"'/]+/)*?(?=(?:harness|benchmarks|recipes)/)")
_OTHER_PATH = re.compile(r"(?<![\w.:/<-])/(?:[\w.+@-]+/)+([\w.+@-]*)")


def _without_paths(text: str) -> str:
    text = _BEFORE_PACKAGE.sub("", text)
    text = _BEFORE_HERE.sub("", text)
    return _OTHER_PATH.sub(r"\1", text)


def _platform(text: Any) -> Any:
    """ "Linux-6.8.0-1013-aws-x86_64-with-glibc2.39" as "Linux x86_64 glibc2.39"."""
    found = re.match(r"(\w+)-.*?(x86_64|aarch64|arm64|AMD64)(?:.*?(glibc[\d.]+))?", str(text))
    return " ".join(filter(None, found.groups())) if found else sanitised(text)


def _as_json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()


if __name__ == "__main__":
    sys.exit(main())
