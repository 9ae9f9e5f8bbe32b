"""What the tests do not notice: changes of the code, one at a time, and whether a test fails.

python -m tests.mutation                       every module of modules.toml; writes docs/data/mutation.json
python -m tests.mutation allocator optimizer   only these, and leaves the others as they are
"""

import argparse
import contextlib
import importlib
import json
import sys
import tomllib
from typing import Any

from tests.mutation.forks import Outcome, libraries_of, run_tests
from tests.mutation.mutants import Mutant, mutants_of, sample_of
from tests.support.places import ROOT

HERE = ROOT / "tests/mutation"
RESULTS = ROOT / "docs/data/mutation.json"
UNJUDGED = "not judged"
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "pydantic", "hypothesis", "rich", "typer")


def run_module(module: dict[str, Any]) -> dict[str, Any]:
    """The row of one module; nothing of harness is imported in this process."""
    every = [mutant for path in module["files"] for mutant in mutants_of(path)]
    written = module.get("named", [])
    named, sample = [_named(row) for row in written], sample_of(every, module["sample"])
    outcomes = _outcomes(module["tests"], [*named, *sample])
    tried = list(zip(sample, outcomes[len(named) :], strict=True))
    return {
        **{key: module[key] for key in ("name", "title", "files", "tests")},
        "mutants": len(every),
        "tried": len(sample),
        "killed": sum(outcome.status != 0 and not outcome.timed_out for _, outcome in tried),
        "timed_out": sum(outcome.timed_out for _, outcome in tried),
        "survivors": [_judged(mutant) for mutant, outcome in tried if outcome.status == 0],
        "named": [
            {"what": row["what"], "file": row["file"], "killed_by": outcome.first_failure}
            for row, outcome in zip(written, outcomes, strict=False)
        ],
    }


def _outcomes(tests: list[str], mutants: list[Mutant]) -> list[Outcome]:
    """What became of each, in a fork of this process, which has imported the libraries alone."""
    baseline, libraries = libraries_of(tests, 900)
    if baseline.status != 0:
        raise SystemExit(f"tests.mutation: without a mutant, {baseline.first_failure or tests} fails")
    for name in libraries:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)  # once, instead of in every fork
    if "harness" in sys.modules:  # what runs at its import could not be changed any more
        raise SystemExit(f"tests.mutation: a library that {tests} use imports harness; see OURS in forks.py")
    limit_s = 8 + 3 * baseline.cpu_s
    print(f"  {len(mutants)} mutants, {baseline.cpu_s:.0f} s of processor for all tests", flush=True)
    return [_said(run_tests(tests, mutant, limit_s), mutant) for mutant in mutants]


def _said(outcome: Outcome, mutant: Mutant) -> Outcome:
    kind = "SURVIVED" if outcome.status == 0 else "timed out" if outcome.timed_out else "killed"
    print(
        f"  {kind:9} {outcome.cpu_s:5.1f} s  {mutant.path}:{mutant.line}  {mutant.was} -> {mutant.becomes}"
        f"  [{outcome.first_failure}]",
        flush=True,
    )
    return outcome


def _judged(mutant: Mutant) -> dict[str, Any]:
    """The survivor, with what tests/mutation/judged.toml says of it."""
    rows = tomllib.loads((HERE / "judged.toml").read_text(encoding="utf-8"))["survivor"]
    change = {"file": mutant.path, "was": mutant.was, "becomes": mutant.becomes}
    said = next((row for row in rows if change.items() <= row.items()), {})
    judgement = {"judgement": said.get("judgement", UNJUDGED), "why": said.get("why", "")}
    return {"file": mutant.path, "line": mutant.line, **change, **judgement}


def _named(row: dict[str, str]) -> Mutant:
    """A mutant written by hand: `was`, which stands in the file once, and what it becomes."""
    source = (ROOT / row["file"]).read_text(encoding="utf-8")
    times = source.count(row["was"])
    if times != 1:
        raise SystemExit(f"tests/mutation/modules.toml: {row['was']!r} stands {times} times in {row['file']}")
    line = source[: source.index(row["was"])].count("\n") + 1
    changed = source.replace(row["was"], row["becomes"])
    return Mutant(row["file"], line, row["was"], row["becomes"], changed)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description="What the tests do not notice."
    )
    parser.add_argument("names", nargs="*", metavar="MODULE")
    names = parser.parse_args(arguments).names
    modules = tomllib.loads((HERE / "modules.toml").read_text(encoding="utf-8"))["module"]
    if unknown := set(names) - {module["name"] for module in modules}:
        raise SystemExit(f"tests/mutation/modules.toml has no module {', '.join(sorted(unknown))}")
    for library in LIBRARIES:
        __import__(library)
    import hypothesis

    # the same examples each time; the first that fails is enough, the smallest is not looked for
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile(
        "mutation", derandomize=True, database=None, phases=phases, deadline=None
    )
    hypothesis.settings.load_profile("mutation")
    for module in (module for module in modules if not names or module["name"] in names):
        print(module["name"], flush=True)
        row = run_module(module)
        before = _rows()
        alive = before.get(row["name"], {}).get("survived_at_first", len(row["survivors"]))
        rows = before | {row["name"]: row | {"survived_at_first": alive}}
        print(
            f"  {row['tried']} of {row['mutants']}: {row['killed']} killed, {row['timed_out']} timed out, "
            f"{len(row['survivors'])} survived",
            flush=True,
        )
        kept = [rows[module["name"]] for module in modules if module["name"] in rows]
        RESULTS.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def _rows() -> dict[str, dict[str, Any]]:
    rows = json.loads(RESULTS.read_bytes()) if RESULTS.exists() else []
    return {row["name"]: row for row in rows}


if __name__ == "__main__":
    main(sys.argv[1:])
