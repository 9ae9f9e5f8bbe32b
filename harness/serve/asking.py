"""The page with the form of a question, and the simulations that it asks for, one at a time.

A simulation runs in a process of its own (serve/worker.py), which is killed when the page that asked is gone.
"""

import json
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Literal

from harness.ask import Document, describe_form
from harness.report import render_page

MOST_WAITING = 64
"""The most questions that may wait for their simulation; a further one is refused."""
MOST_REPORTS = 12
"""The simulated runs that are kept for their reports, some MB each."""
LONGEST_S = 900
"""The longest that a simulation may take, in seconds."""
NO_ANSWER = "the simulation ended without an answer: this machine may have too little memory for it."
LOOK_S = 0.2
"""How often, in seconds, a waiting question looks whether its page still listens."""


def ask_page(place: Literal["serve", "static"], runs: str | None = None) -> str:
    """The page with the form. With `serve` its answers come from this server, with `static` from a worker in
    the browser. `runs` is the text of its link to the runs; None for no link."""
    reaching = "; connect-src 'self'" if place == "serve" else "; worker-src 'self'"
    return render_page(
        "ask.html",
        title="Will it fit?",
        data={"form": describe_form()},
        scripts=(f"ask_{place}.js", "ask.js"),
        charts=False,
        reaching=reaching,
        runs=runs,
    )


class Simulator:
    """Simulates one question after the other, each in its turn, in the process of a worker."""

    def __init__(self) -> None:
        self._asked = 0
        """The number of questions given to a worker so far, which numbers their runs."""
        self._turns: deque[object] = deque()
        """An object for each question that waits or is answered, the one that is answered first."""
        self._turn_over = threading.Condition()
        self._worker: _Worker | None = None

    @cached_property
    def folder(self) -> Path:
        """The folder that holds a folder for each simulated run, named by its number."""
        return Path(tempfile.mkdtemp(prefix="harness-serve-"))

    def documents(self, text: str, listens: Callable[[], bool]) -> Generator[Document]:
        """The documents for the question `text`: every LOOK_S how many questions are ahead or what is known
        so far, and at last the answer or what is wrong. The simulation is killed when `listens` returns False
        or the generator is closed."""
        turn = object()
        with self._turn_over:
            is_refused = len(self._turns) >= MOST_WAITING
            if not is_refused:
                self._turns.append(turn)
        if is_refused:  # said without the lock, which others need while this page reads it
            yield {"error": f"{MOST_WAITING} questions wait already. Ask again in a minute.", "fixes": []}
            return
        try:
            while (ahead := self._ahead(turn)) and listens():
                yield {"ahead": ahead}
                with self._turn_over:
                    self._turn_over.wait(LOOK_S)
            if listens():
                yield from self._simulated(text, listens)
        finally:
            with self._turn_over:
                self._turns.remove(turn)
                self._turn_over.notify_all()

    def warm(self) -> None:
        """Start the worker before a question needs it, since that takes seconds."""
        with self._turn_over:
            if self._worker is None and not self._turns:
                self._worker = _Worker(self.folder)

    def run(self, number: str) -> Path | None:
        """The folder of the simulated run of that number; None where it is not kept any more."""
        return next((path for path in self._runs() if path.name == number), None)

    def close(self) -> None:
        """Kill the worker, and remove the runs."""
        if self._worker is not None:
            self._worker.end()
        if "folder" in self.__dict__:  # made when it was first needed
            shutil.rmtree(self.folder, ignore_errors=True)

    def _ahead(self, turn: object) -> int:
        """How many questions are answered before the one with this turn."""
        with self._turn_over:
            return self._turns.index(turn)

    def _runs(self) -> list[Path]:
        """The folders of the runs, the oldest first."""
        return sorted(self.folder.glob("[0-9]*"), key=lambda path: int(path.name))

    def _simulated(self, text: str, listens: Callable[[], bool]) -> Generator[Document]:
        """The worker's documents for a question whose turn it is, with the seconds that it has taken."""
        for old in self._runs()[:-MOST_REPORTS]:
            shutil.rmtree(old, ignore_errors=True)
        if self._worker is None or not self._worker.alive:
            self._worker = _Worker(self.folder)
        found: Document | None
        worker, over, began = self._worker, False, time.monotonic()
        self._asked += 1
        with suppress(BrokenPipeError):  # it has just died, which is seen below
            worker.ask(text, self._asked)
        try:
            while not over and listens():
                found = worker.hear()
                if found is None and not worker.alive:
                    found = {"error": NO_ANSWER, "fixes": [], "over": True}
                over = bool(found and found.get("over"))
                seconds = time.monotonic() - began
                if seconds > LONGEST_S:
                    yield {"error": f"no answer after {LONGEST_S} s. Ask for a smaller one.", "fixes": []}
                    return
                yield {"seconds": round(seconds, 1), **(found or {})}
        finally:
            if not over:
                worker.end()
                self._worker = None


class _Worker:
    """The process of serve/worker.py, which answers one question after the other."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "harness.serve.worker", str(folder)]
        # a session of its own: Ctrl-C is for the server, which ends it
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read_lines, daemon=True).start()

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, text: str, number: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"text": text, "number": number}) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Document | None:
        """The next document; None where the process writes none within LOOK_S."""
        try:
            return json.loads(self._lines.get(timeout=LOOK_S))
        except queue.Empty:
            return None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in filter(None, (self._process.stdin, self._process.stdout)):
            with suppress(BrokenPipeError):  # by a question that could not be sent
                stream.close()
