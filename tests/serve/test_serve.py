"""harness serve: what it lists and opens, and that nothing outside its folder can be had from it."""

import html
import json
import os
import pickle
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import pytest

import harness.serve.server
from harness.errors import InputError
from harness.hardware.hardware import find_hardware
from harness.napkin.prediction import predict
from harness.recipe.file import load_recipe
from harness.serve.server import server_of
from harness.sweep import plan_sweep, run_cells, sweep_of
from pages.ask.serving import answering

HOSTILE = "<img src=x onerror=alert(1)>"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: str


class Served(NamedTuple):
    folder: Path
    port: int

    def ask(self, target: str, *headers: str, method: str = "GET", host: str | None = None) -> Answer:
        """One request, byte for byte as written: nothing is normalized."""
        lines = [f"{method} {target} HTTP/1.1", f"Host: {host or f'127.0.0.1:{self.port}'}", *headers]
        return self.raw("\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1"))

    def raw(self, request: bytes) -> Answer:
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.sendall(request)
            answer = b""
            while part := connection.recv(65536):
                answer += part
        head, _, body = answer.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        named = dict(line.split(": ", 1) for line in lines)
        return Answer(int(status.split()[1]), named, body.decode())

    def report(self, *names: str) -> Answer:
        return self.ask("/report?" + "&".join(f"run={quote(name, safe='')}" for name in names))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A folder with two runs, a profile, a sweep, a snapshot, hostile names, links that lead out of it."""
    around = tmp_path_factory.mktemp("around")
    folder = around / "runs"
    outside = around / "outside"
    for run in (folder / "one", folder / "deep" / "two", folder / HOSTILE.replace("/", ""), outside):
        run.mkdir(parents=True)
    profile = predict(load_recipe("smoke")[1], find_hardware("h100"))
    (folder / "one" / "profile.json").write_text(profile.to_json())
    (folder / "deep" / "two" / "profile.json").write_text(profile.to_json())
    profile.recipe["model"] = "secret-model"
    (outside / "profile.json").write_text(profile.to_json())
    profile.recipe["model"] = HOSTILE
    (folder / HOSTILE / "profile.json").write_text(profile.to_json())
    (folder / "bare.napkin.json").write_text(profile.to_json())
    (folder / "calibration.json").write_text('{"source": "no profile"}')
    (folder / "notes.txt").write_text("private")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "profile.json").write_text(profile.to_json())
    (folder / "linked").symlink_to(outside)
    (folder / "linked.json").symlink_to(outside / "profile.json")
    (folder / "half").mkdir()
    (folder / "half" / "profile.json").symlink_to(outside / "profile.json")
    (folder / "broken").mkdir()
    (folder / "broken" / "profile.json").write_text("{")

    plan = plan_sweep("smoke", ["micro_batch_size=1,2"], "napkin")
    (folder / "swept" / "cells").mkdir(parents=True)
    rows = list(run_cells(plan, folder / "swept"))
    (folder / "swept" / "sweep.json").write_text(sweep_of(plan, rows).to_json())

    class Touch:
        def __reduce__(self):
            return os.mkdir, (str(around / "pickle-ran"),)

    (folder / "evil.pickle").write_bytes(pickle.dumps(Touch()))
    server = server_of(folder, 0)
    with answering(server):
        yield Served(folder, server.server_port)
    assert not (around / "pickle-ran").exists()


def listed(served: Served) -> set[str]:
    return {html.unescape(name) for name in re.findall(r'data-name="([^"]*)"', served.ask("/runs").body)}


def test_it_lists_what_can_be_opened_and_nothing_else(served: Served):
    names = {"one", "deep/two", HOSTILE, "bare.napkin.json", "broken", "swept", "evil.pickle"}
    assert listed(served) == names
    page = served.ask("/runs").body
    assert "secret-model" not in page
    assert "no profile" not in page
    assert "broken/profile.json is not JSON" in page
    assert "napkin, 3 cells of micro_batch_size" in page


def test_everything_listed_opens_or_says_why_not(served: Served):
    for name in listed(served) - {"broken", "evil.pickle"}:
        answer = served.report(name)
        assert answer.status == 200, name
        assert "<main" in answer.body
    one = served.report("one").body
    peak = predict(load_recipe("smoke")[1], find_hardware("h100")).memory.peak_allocated_bytes
    assert f'data-value="{peak}"' in one
    assert "Peak memory against micro_batch_size" in served.report("swept").body
    assert served.report("broken").status == 422
    evil = served.report("evil.pickle")
    assert evil.status == 422
    assert "evil.pickle" in evil.body


def test_two_are_compared(served: Served):
    answer = served.report("one", "deep/two")
    assert answer.status == 200
    assert "What differs" in answer.body
    assert served.report("one", "swept").status == 422
    assert served.report(*["one"] * 5).status == 400
    assert served.ask("/report").status == 400
    assert served.ask("/report?run=one&junk").status == 400


def test_a_page_is_made_once_until_its_files_change(served: Served, monkeypatch: pytest.MonkeyPatch):
    made: list[str] = []
    real = harness.serve.server._page_of

    def counted(entries: Sequence[harness.serve.server.Entry]) -> str:
        made.extend(entry.name for entry in entries)
        return real(entries)

    monkeypatch.setattr(harness.serve.server, "_page_of", counted)
    path = served.folder / "deep" / "two" / "profile.json"
    served.report("deep/two", "deep/two")
    assert served.report("deep/two", "deep/two").status == 200
    assert made == ["deep/two"] * 2
    path.write_text(path.read_text() + "\n")
    served.report("deep/two", "deep/two")
    assert made == ["deep/two"] * 4


@pytest.mark.parametrize(
    "target",
    [
        *("/../outside/profile.json", "/..%2foutside%2fprofile.json", "/%2e%2e/outside/profile.json"),
        *("/etc/passwd", "//etc/passwd", "/one/profile.json", "/one", "/notes.txt", "/.hidden/profile.json"),
        *(
            *("/linked/profile.json", "/static/../../outside", "/report/one", "/index.html"),
            *("/%00", "/one%00.html"),
        ),
        *(
            *("http://example.org/", "*", "/runs?list=/etc", "/report/../etc/passwd"),
            *("/..\\outside", "/%c0%ae%c0%ae/"),
        ),
    ],
)
def test_no_other_address_is_answered(served: Served, target: str):
    answer = served.ask(target)
    assert answer.status in (400, 404)
    assert "secret-model" not in answer.body
    assert "private" not in answer.body
    assert "root:" not in answer.body


@pytest.mark.parametrize(
    "name",
    [
        *("../outside", "..", ".", "", "/", "linked", "linked.json", "half", ".hidden", "notes.txt", "one/"),
        *(
            *("/etc/passwd", "one/../../outside", "one\0", "../runs/one", "deep/../one"),
            *("deep", "calibration.json"),
        ),
        *("one/profile.json", "swept/cells", "..\\outside", "%2e%2e/outside", "ONE", "file:///etc/passwd"),
    ],
)
def test_no_other_name_is_opened(served: Served, name: str):
    answer = served.report(name)
    assert answer.status in (400, 404)
    assert "secret-model" not in answer.body


def test_an_absolute_path_is_no_name(served: Served):
    assert served.report(str(served.folder / "one")).status == 404
    assert served.report(str(served.folder.parent / "outside")).status == 404


@pytest.mark.parametrize(
    "host",
    ["example.org", "127.0.0.1", "127.0.0.1:1", "localhost.example.org:{port}", "192.168.0.1:{port}", "a b"],
)
def test_another_host_is_refused(served: Served, host: str):
    """DNS rebinding: a page of the web that makes its own name mean 127.0.0.1 still sends its own name."""
    answer = served.ask("/", host=host.format(port=served.port))
    assert answer.status == 403
    assert "one" not in answer.body.replace("instead", "")
    assert "data-name" not in answer.body


def test_its_own_hosts_are_answered_and_two_or_none_are_not(served: Served):
    for host in (f"127.0.0.1:{served.port}", f"localhost:{served.port}", f"LOCALHOST:{served.port}"):
        assert served.ask("/", host=host).status == 200
    own = f"Host: 127.0.0.1:{served.port}"
    assert served.ask("/", "Host: example.org").status == 403
    assert served.raw(b"GET /runs HTTP/1.0\r\n\r\n").status == 403
    assert served.raw(f"GET /runs HTTP/1.0\r\n{own}\r\n\r\n".encode()).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"])
def test_only_get_and_head_are_answered(served: Served, method: str):
    answer = served.ask("/", "Content-Length: 0", method=method)
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET, HEAD"
    assert served.ask("/", method="BREW").status == 501


def test_head_has_the_headers_and_no_body(served: Served):
    got, head = served.ask("/runs"), served.ask("/runs", method="HEAD")
    assert head.body == ""
    assert head.headers["Content-Length"] == got.headers["Content-Length"] == str(len(got.body.encode()))


@pytest.mark.parametrize("target", ["/", "/report?run=one", "/nothing"])
def test_no_page_may_reach_out_or_be_framed(served: Served, target: str):
    headers = served.ask(target).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe-eval" not in policy
    scripts = re.findall(r"script-src ([^;]*)", policy)
    assert all(source.startswith("'sha256-") for source in " ".join(scripts).split())
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in headers


def test_hostile_names_stay_text(served: Served):
    assert html.escape(HOSTILE) in served.ask("/runs").body
    for answer in (served.ask("/runs"), served.report(HOSTILE), served.report("bare.napkin.json")):
        assert "<img" not in answer.body


def test_it_listens_on_this_machine_only(served: Served):
    server = server_of(served.folder, 0)
    try:
        assert server.server_address[0] == "127.0.0.1"
        with pytest.raises(InputError, match="in use"):
            server_of(served.folder, server.server_port)
    finally:
        server.server_close()


def test_a_bug_is_a_page_and_a_traceback_in_the_terminal(
    served: Served, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(harness.serve.server, "urlsplit", None)
    answer = served.ask("/runs")
    assert answer.status == 500
    assert "Traceback" not in answer.body
    assert "TypeError" in capfd.readouterr().err


def test_an_empty_folder_says_how_to_begin(tmp_path: Path):
    page = harness.serve.server.Pages(tmp_path).page("/runs")
    assert "harness run" in page
    assert json.loads(re.findall(r'id="data">(.*?)</script>', page)[0])["mostCompared"] == 4
