"""The process that simulates for `harness serve`: a question a line on stdin, documents on stdout.

It ends with the server, however that ends: then nobody writes to it any more.
"""

import json
import os
import queue
import shutil
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

from harness.ask import Found, Question, answer_of, by_formula, read_question, without_limit
from harness.errors import HarnessError
from harness.system import quiet_libraries, stdout_kept_for_json


def main(folder: Path) -> None:
    """Answer until stdin ends, then remove the folder of the runs."""
    os.nice(5)  # answers by arithmetic come first
    asked: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(asked, folder), daemon=True).start()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")

    def say(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    with stdout_kept_for_json(True):
        quiet_libraries()
        import_module("harness.simulate")  # while nobody waits for it

        while True:
            question = asked.get()
            try:
                _answer(read_question(question["text"]), folder / str(question["number"]), say)
            except HarnessError as error:
                say({"error": str(error), "fixes": [], "over": True})


def _answer(question: Question, folder: Path, say: Any) -> None:
    """By a formula if one knows it, then simulated with its run for a report, then what else fits."""
    from harness.allocator import allocator_settings
    from harness.answers import after_training, simulated
    from harness.fit import fit_confirmed
    from harness.run_folder import RunFolder

    recipe, hardware, settings = question.recipe, question.hardware, allocator_settings(os.environ)
    if (known := by_formula(question)) is not None:
        say({"answer": known})
    say({"doing": "simulating the step"})
    run = RunFolder(folder, question.name, recipe)
    wanted = question.after
    phases = ",".join(["train", *wanted.after])
    after = after_training(recipe, phases, wanted.evaluation, whole_state=wanted.full_state_dict)
    profile, memory = simulated(recipe, hardware, settings, after=after)
    profile.provenance["recipe_name"] = question.name
    run.write_snapshot(memory.snapshot())
    run.write_profile(profile)
    report = f"/report?asked={folder.name}"
    say(
        {
            "answer": answer_of(question, "simulated", profile),
            "report": report,
            "doing": "looking for what else fits",
        }
    )
    found = fit_confirmed(recipe, hardware, settings, told=lambda line: say({"doing": line}))
    wanted = without_limit(question)  # by now a formula knows
    say(
        {
            "answer": answer_of(question, "simulated", profile, Found.seen(found), wanted),
            "report": report,
            "over": True,
        }
    )


def _listen(asked: queue.SimpleQueue[dict[str, Any]], folder: Path) -> None:
    for line in sys.stdin:
        asked.put(json.loads(line))
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
