"""harness serve with many runs, many requests, a run at work, and a folder that changes while it is read."""

import html
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import harness.serve.server
from harness.hardware.hardware import find_hardware
from harness.napkin.prediction import predict
from harness.recipe.file import load_recipe, recipe_yaml
from harness.run_folder.run_folder import RunFolder
from harness.serve import index as serve_index
from harness.serve.index import Index
from harness.serve.log import TAIL_BYTES, read_log
from harness.serve.server import Pages, Refused, server_of
from harness.system.folder_lock import FolderLock
from pages.ask.serving import answering
from tests.support.trust_report import Tried

SECOND = 10**9


@pytest.fixture(scope="module")
def profile() -> str:
    return predict(load_recipe("smoke")[1], find_hardware("h100")).to_json()


def made(folder: Path, profile: str, changed_s: int = 0) -> Path:
    folder.mkdir(parents=True)
    (folder / "profile.json").write_text(profile)
    os.utime(folder / "profile.json", (changed_s, changed_s))
    return folder


def names(page: str) -> list[str]:
    return [html.unescape(name) for name in re.findall(r'data-name="([^"]*)"', page)]


@pytest.fixture
def at_work(tmp_path: Path) -> Iterator[tuple[Path, RunFolder]]:
    """A folder with a run in it that is at its third step."""
    recipe = load_recipe("smoke")[1]
    run = RunFolder(tmp_path / "runs" / "mine", "smoke", recipe)
    for step in range(3):
        line = {"step": step, "kind": "timed", "num_tokens": 1000, "loss": 5.0 - step, "step_s": 0.5}
        run.log({**line, "peak_allocated_bytes": 2**30 * (step + 1)})
    yield tmp_path / "runs", run
    del run


def test_three_thousand_runs_are_all_listed_and_all_open(tmp_path: Path, profile: str, tried: Tried) -> None:
    first = made(tmp_path / "run-0", profile)
    for number in range(1, 3000):
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        os.link(first / "profile.json", folder / "profile.json")
    pages = Pages(tmp_path)
    found = names(pages.page("/runs"))
    assert len(set(found)) == len(found) == 3000
    assert "<main" in pages.page(f"/report?run={found[-1]}")
    assert pages.index.left_out is False
    tried(
        "A server under load",
        "a folder of 3,000 runs",
        "all are listed, in pages, and each opens",
        times=3000,
    )


def test_what_is_not_looked_at_is_said(tmp_path: Path, profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        made(tmp_path / f"run-{number}", profile)
    assert "not looked at" not in Pages(tmp_path).page("/runs")
    monkeypatch.setattr(serve_index, "MOST_ENTRIES", 3)
    assert "3 were found, and the rest was not looked at" in Pages(tmp_path).page("/runs")
    monkeypatch.setattr(serve_index, "MOST_ENTRIES", 100)
    monkeypatch.setattr(serve_index, "MOST_FOLDERS", 3)
    assert "2 were found, and the rest was not looked at" in Pages(tmp_path).page("/runs")


def test_a_thousand_requests_at_once_are_all_answered(
    tmp_path: Path, profile: str, monkeypatch: pytest.MonkeyPatch, tried: Tried
) -> None:
    for number in range(50):
        made(tmp_path / f"run-{number}", profile)
    walks = []
    entries = Index._unread_entries
    monkeypatch.setattr(Index, "_unread_entries", lambda self: walks.append(1) or entries(self))
    server = server_of(tmp_path, 0)
    request = (
        f"GET /runs HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\nConnection: close\r\n\r\n".encode()
    )
    waiting = []
    for _ in range(1000):  # before anybody takes them: the kernel keeps them all
        connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=120)
        connection.sendall(request)
        waiting.append(connection)
    with answering(server):
        for connection in waiting:
            answer = b""
            while part := connection.recv(1 << 16):
                answer += part
            connection.close()
            assert answer.startswith(b"HTTP/1.1 200")
            assert answer.count(b"data-name=") == 50
    # those who ask at the same time share a look; how many do is the scheduler's to say
    assert len(walks) < len(waiting)
    tried("A server under load", "1,000 connections at once", "all answered", times=1000)


def test_the_newest_come_first_and_profiles_apart(tmp_path: Path, profile: str) -> None:
    for name, changed_s in (("a", 1_700_000_000), ("b", 1_800_000_000), ("deep/c", 1_750_000_000)):
        made(tmp_path / name, profile, changed_s)
    (tmp_path / "h100").mkdir()
    (tmp_path / "h100" / "smoke.napkin.json").write_text(profile)  # the newest of all
    page = Pages(tmp_path).page("/runs")
    assert names(page) == ["b", "deep/c", "a", "h100/smoke.napkin.json"]
    assert page.index("deep/c") < page.index("Profiles in files of their own") < page.index("smoke.napkin")


def test_every_report_has_a_way_back(tmp_path: Path, profile: str) -> None:
    made(tmp_path / "run", profile)
    page = Pages(tmp_path).page("/report?run=run")
    assert '<a href="/runs">← All runs</a>' in page
    from harness.report import read_run
    from harness.report.page import report_html

    assert "All runs" not in report_html([read_run(tmp_path / "run")])  # from disk there is no list


def test_a_run_at_work_is_shown_as_it_goes(at_work: tuple[Path, RunFolder], profile: str) -> None:
    folder, run = at_work
    pages = Pages(folder)
    entry = pages.index.entries()[0]
    assert (entry.name, entry.kind, entry.peak_bytes) == ("mine", "running", 3 * 2**30)
    assert entry.tokens_per_s == 2000
    page = pages.page("/report?run=mine")
    assert '<meta http-equiv="refresh" content="5">' in page
    assert "3.0000" in page
    assert "3.00 GiB" in page
    assert page.count("<polyline") == 2
    run.log({"step": 3, "kind": "timed", "loss": None, "peak_allocated_bytes": 4 * 2**30})
    page = pages.page("/report?run=mine")
    assert "not finite" in page
    assert "4.00 GiB" in page
    assert names(pages.page("/runs")) == ["mine"]
    run.write_profile(predict(load_recipe("smoke")[1], find_hardware("h100")))
    page = pages.page("/report?run=mine")
    assert 'http-equiv="refresh"' not in page
    assert "Totals" in page
    assert pages.index.entries()[0].kind == "run"


def test_a_run_that_was_killed_says_so(at_work: tuple[Path, RunFolder]) -> None:
    folder, run = at_work
    pages = Pages(folder)
    assert pages.index.entries()[0].kind == "running"
    assert run._lock is not None
    run._lock.release()  # as the kernel does when the process dies
    page = pages.page("/report?run=mine")
    assert "ended without a profile" in page
    assert 'http-equiv="refresh"' not in page


HOSTILE_LOGS = {
    "no line": b"",
    "half a line": b'{"step": 0, "loss": 1.0}\n{"step": 1, "lo',
    "no JSON": b"\xff\n{\n[]\n7\n",
    "no numbers": b'{"step": "0"}\n{"step": true}\n{"step": 1, "loss": "x", "peak_allocated_bytes": -1}\n',
    "huge numbers": b'{"step": 340282366920938463463374607431768211455, "loss": 1e308, "num_tokens": 1e308}\n'
    * 2,
    "nan": b'{"step": 0, "loss": NaN}\n',
    "zero seconds": b'{"step": 0, "step_s": 0, "num_tokens": 5}\n'
    b'{"step": 0, "step_s": 1e-320, "num_tokens": 5e9}\n',
    "markup": b'{"step": 0, "kind": "<img src=x>", "loss": 1}\n' * 3,
    "deep": b"[" * 100_000 + b"\n",
    "one long line": b"x" * (TAIL_BYTES + 10),
}


@pytest.mark.parametrize("name", HOSTILE_LOGS)
def test_a_log_may_hold_anything(name: str, tmp_path: Path, tried: Tried) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text(recipe_yaml(load_recipe("smoke")[1]))
    (run / "log.jsonl").write_bytes(HOSTILE_LOGS[name])
    pages = Pages(tmp_path)
    page = pages.page("/report?run=run")
    assert "<img" not in page
    assert names(pages.page("/runs")) == ["run"]
    tried(
        "Folders that are served", "a log.jsonl of a run that holds anything", "shown without what is no step"
    )


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("model: x\nsteps: 7\nwarmup_steps: 1\n")
    with open(tmp_path / "log.jsonl", "w") as log:
        for step in range(50_000):
            log.write(json.dumps({"step": step, "kind": "timed", "loss": 1.0}) + "\n")
    read = read_log(tmp_path)
    assert read.steps[-1].step == 49_999
    assert 5_000 < len(read.steps) < 20_000
    assert read.in_words() == "step 50000 of 8, loss 1.0000"


def test_what_vanishes_while_it_is_listed_is_left_out(
    tmp_path: Path, profile: str, monkeypatch: pytest.MonkeyPatch, tried: Tried
) -> None:
    for name in ("a", "b", "c"):
        made(tmp_path / name, profile)
    (tmp_path / "d.json").write_text(profile)
    lstat, gone = os.lstat, []

    def vanishing(path: Path) -> os.stat_result:
        """Everything of `b`, and d.json, goes after it was seen and before it is asked about again."""
        status = lstat(path)
        if str(path).endswith(("b/profile.json", "d.json")):
            if path in gone:
                raise FileNotFoundError(path)
            gone.append(path)
        return status

    monkeypatch.setattr(serve_index.os, "lstat", vanishing)
    pages = Pages(tmp_path)
    assert names(pages.page("/runs")) == ["a", "c"]
    monkeypatch.undo()
    assert set(names(pages.page("/runs"))) == {"a", "b", "c", "d.json"}
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(Refused, match="no such run"):
        pages.page("/report?run=a")
    (tmp_path / "c" / "profile.json").unlink()
    with pytest.raises(Refused, match="no such run"):
        pages.page("/report?run=c")
    assert set(names(pages.page("/runs"))) == {"b", "d.json"}
    fault = "runs and files that vanish while the folder is listed, and between the list and the report"
    tried("Folders that are served", fault, "left out; 404 for one that was listed", times=4)


def test_folders_that_come_and_go_while_many_ask(tmp_path: Path, profile: str, tried: Tried) -> None:
    made(tmp_path / "stays", profile)
    pages, stop, failures = Pages(tmp_path), threading.Event(), list[BaseException]()

    def ask() -> None:
        while not stop.is_set():
            try:
                assert "stays" in names(pages.page("/runs"))
                pages.page("/report?run=goes")
            except Refused:
                pass
            except harness.serve.server.HarnessError:  # it vanished while it was read
                pass
            except BaseException as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        made(tmp_path / "goes", profile)
        time.sleep(0.002)
        shutil.rmtree(tmp_path / "goes")
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    fault = "runs made and removed while four threads list and open them"
    tried("Folders that are served", fault, "no traceback; what stays is always listed", times=100)


def test_times_of_a_clock_that_was_wrong(tmp_path: Path, profile: str, tried: Tried) -> None:
    """Files from the future, from before 1970, and from a year that no calendar has."""
    stamps = {"future": 4 * 10**9, "past": -(10**9), "never": 2**33 - 1, "now": int(time.time())}
    for name, stamp in stamps.items():
        made(tmp_path / name, profile)
        os.utime(tmp_path / name / "profile.json", ns=(stamp * SECOND, stamp * SECOND))
    page = Pages(tmp_path).page("/runs")
    assert names(page) == ["never", "future", "now", "past"]
    entry = Index(tmp_path).entries()[0]
    far = serve_index.Entry("a", "run", tmp_path, (("profile.json", 1, 2**120),))
    assert far.changed == "-"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", entry.changed)
    tried(
        "Clocks",
        "files dated in the future, before 1970, beyond the calendar",
        "listed, by their date",
        times=4,
    )


@pytest.mark.parametrize("name", ["x.json", "x.pickle", "run/profile.json", "run/log.jsonl", "sweep.json"])
def test_a_pipe_in_the_folder_is_not_waited_for(
    name: str, tmp_path: Path, profile: str, tried: Tried
) -> None:
    made(tmp_path / "good", profile)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("model: x\n")
    os.mkfifo(tmp_path / name)
    pages = Pages(tmp_path)
    assert names(pages.page("/runs")) == ["good"]
    for wanted in (name, "run", "."):
        with pytest.raises(Refused):
            pages.page(f"/report?run={wanted}")
    tried(
        "Folders that are served",
        "a pipe in the place of a profile, a log, a snapshot or a sweep",
        "not listed",
    )


def test_asking_whether_a_run_is_at_work_does_not_stop_one(tmp_path: Path) -> None:
    """The list looks at the lock for an instant; who wants it tries again."""
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            serve_index.is_held(tmp_path)

    FolderLock(tmp_path, "--out a").release()
    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(20):
            FolderLock(tmp_path, "--out a").release()
    finally:
        stop.set()
        thread.join()
