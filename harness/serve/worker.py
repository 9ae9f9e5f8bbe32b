"""The process that simulates for `harness serve`: it reads a question from each line of stdin, and writes the
documents of the answer as lines of JSON to stdout.

However the server ends, this process then ends too, since its stdin is closed.
"""

import json
import os
import queue
import shutil
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from harness.ask import Document, Found, Question, answer_of, by_formula, read_question, without_limit
from harness.errors import HarnessError
from harness.system import quiet_libraries, stdout_kept_for_json


def main(folder: Path) -> None:
    """Answer the questions until stdin ends. `folder` is where the runs go; it is removed at the end."""
    os.nice(5)  # the server's answers by arithmetic come first
    questions: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(questions, folder), daemon=True).start()
    documents = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")

    def send(document: Document) -> None:
        documents.write(json.dumps(document) + "\n")
        documents.flush()

    with stdout_kept_for_json(True):
        quiet_libraries()
        import_module("harness.simulate")  # which takes seconds, while nobody waits for it

        while True:
            question = questions.get()
            try:
                _answer(read_question(question["text"]), folder / str(question["number"]), send)
            except HarnessError as error:
                send({"error": str(error), "fixes": [], "over": True})


def _answer(question: Question, folder: Path, send: Callable[[Document], None]) -> None:
    """Send the answer of a formula if one covers the question, then that of a simulation, whose run is
    written to `folder` for a report, and then the same with the largest sizes that fit and changes."""
    from harness.allocator import allocator_settings
    from harness.answers import after_training, simulated
    from harness.fit import fit_confirmed
    from harness.run_folder import RunFolder

    recipe, hardware, settings = question.recipe, question.hardware, allocator_settings(os.environ)
    if (known := by_formula(question)) is not None:
        send({"answer": known})
    send({"doing": "simulating the step"})
    run = RunFolder(folder, question.name, recipe)
    follows = question.after
    phases = ",".join(["train", *follows.after])
    after = after_training(recipe, phases, follows.evaluation, whole_state=follows.full_state_dict)
    profile = simulated(question.name, recipe, hardware, settings, folder=run, after=after)
    report = f"/report?asked={folder.name}"
    first = answer_of(question, "simulated", profile)
    send({"answer": first, "report": report, "doing": "looking for what else fits"})
    found = fit_confirmed(recipe, hardware, settings, told=lambda line: send({"doing": line}))
    unlimited = without_limit(question)  # `fit_confirmed` has derived a formula by now
    last = answer_of(question, "simulated", profile, Found.seen(found), unlimited)
    send({"answer": last, "report": report, "over": True})


def _listen(questions: queue.SimpleQueue[dict[str, Any]], folder: Path) -> None:
    """Put each question of stdin into the queue, and end the process with stdin, whatever it is doing."""
    for line in sys.stdin:
        questions.put(json.loads(line))
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
