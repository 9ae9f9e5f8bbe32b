"""What the tests do not notice: changes of the code, one at a time, and whether a test fails.

python -m tests.mutation                       every module of modules.toml; writes docs/data/mutation.json
python -m tests.mutation allocator optimizer   only these, and leaves the others as they are
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

from tests.mutation.forks import NEEDS_IMPORT, Collected, Outcome, import_from, libraries_of, run_tests
from tests.mutation.mutants import Mutant, mutants_of, sample_of
from tests.support.places import ROOT

HERE = ROOT / "tests/mutation"
RESULTS = ROOT / "docs/data/mutation.json"
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "pydantic", "hypothesis", "rich", "typer")


def run_module(module: dict[str, Any]) -> dict[str, Any]:
    """The row of one module; nothing of harness is imported in this process."""
    every = [mutant for path in module["files"] for mutant in mutants_of(path)]
    named = [_named(row) for row in module.get("named", [])]
    chosen = [*named, *sample_of(every, module["sample"])]
    outcomes = _outcomes(module["tests"], chosen)
    survivors = []
    for mutant, outcome in zip(chosen, outcomes, strict=True):
        if outcome.status == 0:
            survivors.append(
                {"file": mutant.path, "line": mutant.line, "was": mutant.was, "becomes": mutant.becomes}
            )
    sampled = outcomes[len(named) :]
    return {
        "name": module["name"],
        "files": module["files"],
        "tests": module["tests"],
        "mutants": len(every),
        "tried": len(sampled),
        "killed": sum(outcome.status != 0 and not outcome.timed_out for outcome in sampled),
        "timed_out": sum(outcome.timed_out for outcome in sampled),
        "survivors": survivors,
        "named": [
            {"what": row["what"], "file": row["file"], "killed_by": outcome.first_failure}
            for row, outcome in zip(module.get("named", []), outcomes, strict=False)
        ],
    }


def _outcomes(tests: list[str], mutants: list[Mutant]) -> list[Outcome]:
    """What became of each. Those in functions share a fork that has collected the tests."""
    outcomes: list[Outcome | None] = [None] * len(mutants)
    baseline, libraries = libraries_of(tests, 900)
    if baseline.status != 0:
        raise SystemExit(f"tests.mutation: without a mutant, {baseline.first_failure or tests} fails")
    for name in libraries:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)  # once, instead of in every fork
    limit_s = 20 + 4 * baseline.cpu_s
    print(f"  {len(mutants)} mutants, {baseline.cpu_s:.0f} s of processor for all tests", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "outcomes.json")
        child = os.fork()
        if not child:
            try:
                collected = Collected(tests, [mutant.path for mutant in mutants])
                found = []
                for n, mutant in enumerate(mutants):
                    if mutant.in_function:
                        outcome = run_tests(tests, partial(collected.put_in, mutant), limit_s)
                        found.append((n, vars(_said(outcome, mutant))))
                written.write_text(json.dumps(found))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        for n, outcome in json.loads(written.read_text()):
            outcomes[n] = Outcome(**outcome)
    for n, mutant in enumerate(mutants):
        outcome = outcomes[n]
        if outcome is None or outcome.status == NEEDS_IMPORT:
            outcomes[n] = _said(run_tests(tests, partial(import_from, mutant), limit_s), mutant)
    return [outcome for outcome in outcomes if outcome is not None]


def _said(outcome: Outcome, mutant: Mutant) -> Outcome:
    kind = {0: "SURVIVED", NEEDS_IMPORT: "again"}.get(
        outcome.status, "timed out" if outcome.timed_out else "killed"
    )
    print(
        f"  {kind:9} {outcome.cpu_s:5.1f} s  {mutant.path}:{mutant.line}  {mutant.was} -> {mutant.becomes}"
        f"  [{outcome.first_failure}]",
        flush=True,
    )
    return outcome


def _named(row: dict[str, str]) -> Mutant:
    """A mutant written by hand: `was`, which stands in the file once, and what it becomes."""
    source = (ROOT / row["file"]).read_text(encoding="utf-8")
    if source.count(row["was"]) != 1:
        raise SystemExit(
            f"tests/mutation/modules.toml: {row['was']!r} stands {source.count(row['was'])} times in {row['file']}"
        )
    line = source[: source.index(row["was"])].count("\n") + 1
    return Mutant(
        row["file"], line, row["was"], row["becomes"], source.replace(row["was"], row["becomes"]), True
    )


def main(names: list[str]) -> None:
    modules = tomllib.loads((HERE / "modules.toml").read_text(encoding="utf-8"))["module"]
    for library in LIBRARIES:
        __import__(library)
    import hypothesis

    hypothesis.settings.register_profile("mutation", derandomize=True, database=None)
    hypothesis.settings.load_profile("mutation")
    for module in modules:
        if names and module["name"] not in names:
            continue
        print(module["name"], flush=True)
        row = run_module(module)
        rows = {row["name"]: row for row in json.loads(RESULTS.read_bytes())} if RESULTS.exists() else {}
        rows[row["name"]] = row
        print(
            f"  {row['tried']} of {row['mutants']}: {row['killed']} killed, {row['timed_out']} timed out, {len(row['survivors'])} survived",
            flush=True,
        )
        RESULTS.write_text(
            json.dumps([rows[m["name"]] for m in modules if m["name"] in rows], indent=1) + "\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
