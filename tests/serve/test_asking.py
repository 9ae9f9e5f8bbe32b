"""What the page of harness serve asks: who may, what is answered, and that nothing is left behind."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.ask.documents import arithmetic
from harness.serve import asking
from harness.serve.asking import Simulator
from harness.serve.server import server_of
from pages.ask.serving import answering
from tests.support.commands import Call
from tests.support.places import ROOT

SMOKE = "recipe=smoke&seq_len=64&hardware=l4"
FROM_PAGE = {"X-Harness": "ask"}
SLOW = "recipe=llama-3.1-70b-qlora&hardware=h100&gradient_accumulation_steps=64"
PATIENCE_S = 120


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    serving = server_of(tmp_path, 0)
    with answering(serving):
        yield serving


def asked(
    port: int, target: str, headers: dict[str, str] = FROM_PAGE, method: str = "GET"
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request(method, target, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def listening_to(port: int, query: str) -> socket.socket:
    """Someone who waits for a simulation."""
    one = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    request = f"GET /simulate?{query} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nX-Harness: ask\r\n\r\n"
    one.sendall(request.encode())
    assert one.recv(1000).startswith(b"HTTP/1.1 200")
    return one


def worker_of(server: Any) -> subprocess.Popen[str]:
    return within(lambda: server.pages.simulator._worker)._process


def within(what: Any, patience_s: float = PATIENCE_S) -> Any:
    """What it gives, as soon as it gives something."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError("nothing came of it")


def test_an_answer_is_the_one_of_the_function(server: Any) -> None:
    status, body = asked(server.server_port, f"/answer?{SMOKE}")
    assert status == 200
    assert json.loads(body) == json.loads(json.dumps(arithmetic(SMOKE)))
    status, body = asked(server.server_port, "/answer?recipe=nothing")
    assert (status, json.loads(body)["fixes"]) == (200, [])
    assert json.loads(asked(server.server_port, f"/cards?{SMOKE}")[1])["cards"]


@pytest.mark.parametrize("path", ["/answer", "/cards", "/simulate"])
@pytest.mark.parametrize(
    ("headers", "method"),
    [
        ({}, "GET"),  # a picture or a form of another page
        ({**FROM_PAGE, "Origin": "http://evil.example"}, "GET"),
        ({**FROM_PAGE, "Origin": "null"}, "GET"),
        ({**FROM_PAGE, "Sec-Fetch-Site": "cross-site"}, "GET"),
        ({**FROM_PAGE, "Sec-Fetch-Site": "same-site"}, "GET"),
        ({**FROM_PAGE, "Host": "evil.example"}, "GET"),
        (FROM_PAGE, "HEAD"),
    ],
)
def test_only_its_own_page_may_ask(server: Any, path: str, headers: dict[str, str], method: str) -> None:
    assert asked(server.server_port, f"{path}?{SMOKE}", headers, method)[0] == 403
    assert server.pages.simulator._worker is None


def test_a_browser_that_asks_first_is_refused(server: Any) -> None:
    """Another origin's page cannot send the header: its browser asks by OPTIONS."""
    ours = {"Origin": "http://evil.example", "Access-Control-Request-Headers": "x-harness"}
    assert asked(server.server_port, "/answer", ours, "OPTIONS")[0] == 405


def test_its_own_page_may_ask(server: Any) -> None:
    own = {"Origin": f"http://127.0.0.1:{server.server_port}", "Sec-Fetch-Site": "same-origin"}
    assert asked(server.server_port, f"/answer?{SMOKE}", {**FROM_PAGE, **own})[0] == 200


def test_a_simulation_says_what_the_command_says_and_leaves_a_report(server: Any, call: Call) -> None:
    _, body = asked(server.server_port, f"/simulate?{SMOKE}")
    documents = [json.loads(line) for line in body.splitlines()]
    last = documents[-1]
    assert last["over"]
    assert [one["seconds"] for one in documents] == sorted(one["seconds"] for one in documents)
    _, printed, _ = call("simulate", "smoke", "seq_len=64", "hardware=l4", "--json")
    assert last["answer"]["source"] == "simulated"
    assert last["answer"]["bar"]["taken_bytes"] == json.loads(printed)["memory"]["process_bytes"]
    _, found, _ = call("fit", "smoke", "seq_len=64", "hardware=l4", "--json")
    rows = {row["name"]: row["value"] for row in last["answer"]["rows"]}
    assert rows["largest batch"] == f"{json.loads(found)['largest_micro_batch_size']:,}"
    assert rows["largest length"] == f"{json.loads(found)['largest_seq_len']:,}"
    status, report = asked(server.server_port, last["report"], {})
    assert status == 200
    assert "<h1>smoke" in report
    assert asked(server.server_port, "/report?asked=999", {})[0] == 404
    assert asked(server.server_port, "/report?asked=../../etc", {})[0] == 404
    _, again = asked(server.server_port, f"/simulate?{SMOKE}")
    assert any(json.loads(line).get("answer", {}).get("source") == "formula" for line in again.splitlines())


def test_a_wrong_question_ends_at_once_and_the_next_is_answered(server: Any) -> None:
    for wrong in ("recipe=nothing", "model=/etc/passwd", "recipe=smoke&adapter=none&quantization=nf4"):
        _, body = asked(server.server_port, f"/simulate?{wrong}")
        assert json.loads(body.splitlines()[-1])["error"]
    worker = worker_of(server)
    _, body = asked(server.server_port, "/simulate?recipe=smoke&seq_len=32&compile=true")
    assert "compile" in json.loads(body.splitlines()[-1])["error"]
    assert worker.poll() is None  # it is the same, and still there


def test_who_stops_listening_ends_the_simulation(server: Any) -> None:
    one = listening_to(server.server_port, SLOW)
    worker = worker_of(server)
    within(lambda: server.pages.simulator._turns)
    time.sleep(0.5)
    one.close()
    assert within(lambda: worker.poll() is not None, 10)
    within(lambda: not server.pages.simulator._turns, 10)


def test_one_at_a_time_and_who_leaves_the_queue_is_not_waited_for(server: Any) -> None:
    turns = server.pages.simulator._turns
    first = listening_to(server.server_port, SLOW)
    within(lambda: len(turns) == 1)  # its answer began before it took its turn
    waiting = [listening_to(server.server_port, SLOW) for _ in range(20)]
    within(lambda: len(turns) == 21)
    worker = worker_of(server)
    for one in waiting:
        one.close()
    within(lambda: len(turns) == 1, 10)
    assert worker.poll() is None  # theirs was not the one at work
    first.close()
    within(lambda: not turns, 10)


def test_one_too_many_is_refused_and_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = Simulator()
    monkeypatch.setattr(asking, "MOST_WAITING", 0)
    refused = simulator.documents(SMOKE, lambda: True)
    assert "wait already" in next(refused)["error"]
    with ThreadPoolExecutor(1) as pool:  # while the page that is refused reads why
        assert pool.submit(simulator._turn_over.acquire, blocking=False).result()
    assert not simulator._turns


def test_a_worker_that_dies_before_it_is_asked_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = Simulator()
    simulator.warm()
    worker = worker_of(SimpleNamespace(pages=SimpleNamespace(simulator=simulator)))
    worker.kill()
    worker.wait()
    lives = iter([True])  # as it looks before the question is sent
    monkeypatch.setattr(asking._Worker, "alive", property(lambda _: next(lives, False)))
    *_, last = simulator.documents(SMOKE, lambda: True)
    assert "without an answer" in last["error"]
    simulator.close()


def test_a_worker_that_dies_is_said_and_replaced(server: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        body = pool.submit(asked, server.server_port, f"/simulate?{SLOW}")
        worker = worker_of(server)
        time.sleep(0.5)
        worker.kill()
        assert "without an answer" in json.loads(body.result()[1].splitlines()[-1])["error"]
    _, body = asked(server.server_port, "/simulate?recipe=nothing")
    assert "error" in json.loads(body.splitlines()[-1])


def test_fifty_questions_at_once_are_all_answered(server: Any) -> None:
    questions = [f"recipe=llama-3.1-8b-lora&micro_batch_size={n}&hardware=h100" for n in range(1, 51)]
    with ThreadPoolExecutor(50) as pool:
        answers = [*pool.map(lambda text: asked(server.server_port, f"/answer?{text}"), questions)]
    assert [status for status, _ in answers] == [200] * 50
    sizes = [json.loads(body)["said"]["micro_batch_size"] for _, body in answers]
    assert sizes == [*range(1, 51)]
    alone = json.loads(json.dumps(arithmetic(questions[17])))
    assert json.loads(answers[17][1]) == alone


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda how: how.name)
def test_an_ended_server_leaves_no_process_and_no_files(how: signal.Signals, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "harness", "serve", str(tmp_path), "--port", "0"]
    serving = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert serving.stdout is not None
    port = int(serving.stdout.readline().split(":")[2].split("/")[0])
    one = listening_to(port, SLOW)
    (worker,) = within(lambda: children_of(serving.pid))
    within(lambda: [*tmp_path.glob("harness-serve-*")])
    time.sleep(1)
    serving.send_signal(how)
    serving.wait(10)
    within(lambda: not Path(f"/proc/{worker}").exists() or "Z" in state_of(worker), 10)
    within(lambda: not [*tmp_path.glob("harness-serve-*")], 10)
    one.close()


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.glob("*/children") for child in task.read_text().split()]


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
