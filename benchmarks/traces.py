"""The recorded traces, held against the two models, or unpacked for other instruments.

    python -m benchmarks.traces replay [TRACE ...]      does the allocator model make the same segments?
    python -m benchmarks.traces compare [TRACE ...]     does the simulation make the same requests?
    python -m benchmarks.traces unpack DIR [TRACE ...]  <name>.pickle for the memory_viz page and for `diff`,
                                                        <name>.yaml beside it
    python -m benchmarks.traces diff RECIPE SNAPSHOT [KEY=VALUE ...] [hardware=NAME]
                                                        where the recorded requests are not the simulated ones

Without TRACE: all of tests/recordings/traces and tests/recordings/virtual_gpu.
"""

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from benchmarks.command import parser_of
from benchmarks.gpu_programme.trace_file import Trace, load_trace
from benchmarks.predict import simulation_settings
from benchmarks.trace_diff.in_words import trace_diff_lines
from benchmarks.trace_diff.replay import Replay, replay
from benchmarks.trace_diff.traces import TraceDiff, diff_traces
from harness.allocator.memory_stats import snapshot_segments
from harness.allocator.settings import Settings, settings_from_environment
from harness.errors import InputError
from harness.hardware import split_hardware
from harness.hardware.hardware import Hardware, find_hardware
from harness.hardware.table import TABLE_NAMES
from harness.recipe import load_recipe, recipe_yaml
from harness.simulate.simulated_run import simulate
from harness.snapshot import read_snapshot, recording_of, write_snapshot
from harness.step_profile.step_profile import StepProfile
from harness.system.files import write_whole
from harness.system.streams import quiet_libraries
from harness.system.versions import installed_version

RECORDINGS = Path(__file__).resolve().parents[1] / "tests" / "recordings"
THREE_STEPS = {"warmup_steps": 1, "steps": 0}
"""What gpu_traces.record runs: a step to warm up, and two that are recorded."""


@dataclass(frozen=True)
class Compared:
    """A recorded run against the simulation of its recipe."""

    trace: Trace
    profile: StepProfile
    diff: TraceDiff
    """Of the last step."""

    def peaks(self) -> dict[str, tuple[int | None, int | None]]:
        """(recorded, simulated) bytes. A run that ran out of memory is compared where it did."""
        memory, oom = self.profile.memory, self.profile.oom
        if self.trace.oom is not None:
            failed = next(entry for entry in self.trace.entries if entry["action"] == "oom")
            return {
                "request that failed": (failed["size"], oom.requested_bytes if oom else None),
                "free then": (failed["device_free"], oom.free_bytes if oom else None),
            }
        # DDP's second step makes its buckets anew
        steady = 2 if self.trace.recipe_fields.get("parallel") == "ddp" else 1
        return {
            "setup": (self._recorded("allocated", -1, 0), memory.setup_peak_allocated_bytes),
            "first step": (self._recorded("allocated", 0, 1), memory.first_step_peak_allocated_bytes),
            "allocated": (self._recorded("allocated", steady, None), memory.peak_allocated_bytes),
            "reserved": (self._recorded("reserved", steady, None), memory.peak_reserved_bytes),
        }

    def _recorded(self, quantity: str, start: int, end: int | None) -> int:
        """The peak of the steps from `start` (-1: setup), before `end`."""
        return max(
            phase[f"{quantity}_bytes.all.peak"]
            for phase in self.trace.phases
            if phase["step"] >= start and (end is None or phase["step"] < end)
        )

    @property
    def same_requests(self) -> bool:
        """Whether the last step makes the same requests in the same order.

        But for autocast: it frees the casts it kept in the order of a hash of their addresses, which is
        another one in every process.
        """
        real = [event for divergence in self.diff.divergences for event in divergence.only_real]
        ours = [event for divergence in self.diff.divergences for event in divergence.only_simulated]
        by_autocast = [
            any(f["filename"].endswith("autocast_mode.py") for f in event.frames) for event in real
        ]
        theirs, mine = (Counter(event.token for event in events) for events in (real, ours))
        only_frees = all(event.action == "free" for event in real)
        if self.trace.oom is not None:  # on its way up the exception frees what there is
            return only_frees and mine <= theirs
        return only_frees and mine == theirs and all(by_autocast)


def compared(trace: Trace, hardware: Hardware) -> Compared:
    """Simulate the trace's recipe on `hardware`, with the settings of the recording, by today's libraries."""
    settings = simulation_settings(trace.provenance["settings"])
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, settings):
        recipe = trace.recipe(Path(folder)).model_copy(update=THREE_STEPS)
        profile, memory = simulate(recipe, hardware, settings_of(trace))
    return Compared(trace, profile, diff_traces(trace.entries, memory.snapshot()["device_traces"][0]))


def hardware_of(trace: Trace) -> Hardware:
    """The device of the recording in the hardware table. Raises InputError if it is not there."""
    name = trace.device["name"]
    if name not in TABLE_NAMES:
        raise InputError(f"{trace.name} was recorded on {name}, which is not in the hardware table.")
    return find_hardware(TABLE_NAMES[name])


def missing_libraries(trace: Trace) -> list[str]:
    """What differs from the libraries of the recording and decides about allocations, in words."""
    found = []
    for library in ("torch", "transformers", "peft", "bitsandbytes"):
        theirs = trace.provenance["versions"].get(library, "none")
        ours = installed_version(library) or "none"
        if theirs.partition("+")[0] != ours.partition("+")[0]:
            found.append(f"recorded with {library} {theirs}, and {ours} is installed")
    return found


def replayed(trace: Trace) -> Replay:
    """The trace's requests, made to the allocator model with the recorded settings."""
    return replay(trace.entries, settings_of(trace), trace.device["memory_bytes"])


def settings_of(trace: Trace) -> Settings:
    """The allocator settings and the order of free blocks of the recorded process."""
    environment = trace.provenance.get("settings") or {}
    return settings_from_environment(environment, trace.provenance["versions"]["torch"])


def same_segments(trace: Trace, made: Replay) -> bool:
    """Whether the model ends with the recorded segments: addresses, sizes, and every block in them."""
    ours = [_shape(segment) for segment in snapshot_segments(made.allocator)]
    return ours == sorted(_shape(segment) for segment in trace.segments)


def unpack(trace: Trace, folder: Path) -> Path:
    """Write <name>.pickle and <name>.yaml (and the config of a cut model) to `folder`; the first's path."""
    path = folder / f"{trace.name}.pickle"
    write_snapshot(path, trace.snapshot())
    write_whole(folder / f"{trace.name}.yaml", recipe_yaml(trace.recipe(folder)))
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit status 0; 1 if a replay diverges; 2 for bad input."""
    parser = parser_of("benchmarks.traces", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("replay").add_argument("trace", nargs="*", type=Path)
    commands.add_parser("compare").add_argument("trace", nargs="*", type=Path)
    differing = commands.add_parser("diff")
    differing.add_argument("recipe")
    differing.add_argument("snapshot", type=Path)
    differing.add_argument("changes", nargs="*")
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("folder", type=Path)
    unpacking.add_argument("trace", nargs="*", type=Path)
    options = parser.parse_args(arguments)
    try:
        if options.command == "diff":
            print("\n".join(trace_diff_lines(_of_recipe(options.recipe, options.snapshot, options.changes))))
            return 0
        paths = options.trace or sorted(
            [*RECORDINGS.glob("traces/*.json.gz"), *RECORDINGS.glob("virtual_gpu/*/*.json.gz")]
        )
        if not paths:
            raise InputError(
                f"{RECORDINGS} holds no trace. Record some: python -m benchmarks.gpu_programme --part traces."
            )
        if options.command == "unpack":
            options.folder.mkdir(parents=True, exist_ok=True)
            for path in paths:
                print(unpack(load_trace(path), options.folder))
            return 0
        if options.command == "compare":
            quiet_libraries()
            return int(not all([_report_simulated(load_trace(path)) for path in paths]))
        return int(not all([_report(load_trace(path)) for path in paths]))
    except InputError as error:
        print(f"benchmarks.traces: {error}", file=sys.stderr)
        return error.exit_status


def _of_recipe(recipe: str, snapshot: Path, changes: Sequence[str]) -> TraceDiff:
    """A recipe's simulation against the snapshot of a run of it."""
    quiet_libraries()
    hardware, overrides = split_hardware(changes)
    recorded = read_snapshot(snapshot)
    _, memory = simulate(load_recipe(recipe, overrides)[1], hardware)
    return diff_traces(recording_of(recorded).trace, memory.snapshot()["device_traces"][0])


def _report(trace: Trace) -> bool:
    made = replayed(trace)
    if made.divergence is not None:
        where = f"entry {made.divergence.index} of {len(trace.entries)}"
        print(f"{trace.name}: {where}: {made.divergence.problem}")
        print("".join(f"    {event}\n" for event in made.divergence.before), end="")
        return False
    same = same_segments(trace, made)
    blocks = "and blocks" if same else "but not the same blocks"
    print(f"{trace.name}: {made.requests} requests, the same segments {blocks}")
    return same


def _report_simulated(trace: Trace) -> bool:
    result = compared(trace, hardware_of(trace))
    peaks = {name: (real, ours) for name, (real, ours) in result.peaks().items() if real != ours}
    events = sum(phase.real_events for phase in result.diff.phases)
    print(f"{trace.name}: {events} events, {'the same' if result.same_requests else 'not the same'} requests")
    for name, (real, ours) in peaks.items():
        print(f"    {name}: recorded {real}, simulated {ours}")
    for line in missing_libraries(trace):
        print(f"    {line}")
    return result.same_requests and not peaks


def _shape(segment: dict) -> tuple:
    blocks = tuple((block["size"], block["state"].startswith("active")) for block in segment["blocks"])
    return segment["address"], segment["total_size"], segment["stream"], segment["segment_type"], blocks


if __name__ == "__main__":
    sys.exit(main())
