"""Whatever a folder holds: served, resumed, swept again, or refused in one clear sentence.

As in trust/test_fuzz.py, a small seeded set here and FUZZ examples of each kind in `make fuzz`.
"""

import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cli.terminal.sweep import print_sweep
from harness.cli.terminal.terminal import Terminal
from harness.measure import Silent, measure
from harness.run_folder.checkpoint_files import MANIFEST, checkpoints
from harness.run_folder.run_folder import RunFolder
from harness.serve.server import Handler, Pages
from harness.step_profile.step_profile import StepProfile
from harness.sweep import Plan, Sweep, as_csv, as_markdown, plan_sweep, run_cells, sweep_html, sweep_of
from harness.system import versions
from tests.support.attempts import Count, attempt, fuzzed, written
from tests.support.fuzzed import PICKLES, as_json, changed, junk, profile_document, spliced, texts
from tests.support.tiny import CPU, tiny
from tests.support.watched import watched


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks git for the commit: it is the one program that a command runs."""
    monkeypatch.setattr(versions, "_commit", dict)


CANARY = "lies outside of the served folder"
PORT = 8642
ANSWERS = {200, 400, 403, 404, 405, 408, 414, 422, 431, 501, 505}
"""Statuses of HTTP that are an answer or a refusal; 500 is a bug."""


# serve ------------------------------------------------------------------------------------------


class Wire:
    """A connection on which `request` has come, and nothing more will; `answer` is what was sent back."""

    def __init__(self, request: bytes) -> None:
        self.request, self.answer = request, b""

    def settimeout(self, seconds: float) -> None:
        """See socket.socket."""

    def makefile(self, *_: Any) -> io.BytesIO:
        """See socket.socket."""
        return io.BytesIO(self.request)

    def sendall(self, data: bytes) -> None:
        """See socket.socket."""
        self.answer += bytes(data)


class Asked:
    """A folder, asked without a socket."""

    def __init__(self, folder: Path) -> None:
        self.pages = Pages(folder)

    def status(self, request: bytes) -> int:
        """Of the first answer; 0 for what gets none. Checks that all answers are fit to be sent."""
        wire = Wire(request)
        Handler(
            cast(Any, wire), ("127.0.0.1", 1), cast(Any, SimpleNamespace(server_port=PORT, pages=self.pages))
        )
        assert CANARY.encode() not in wire.answer
        if not wire.answer.startswith(b"HTTP/"):  # nothing, or HTTP/0.9, which has no head
            return 0
        status = int(wire.answer.split(b" ", 2)[1])
        assert status in ANSWERS, wire.answer[:300]
        return status

    def get(self, target: str) -> int:
        return self.status(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1:{PORT}\r\n\r\n".encode())


@cache
def plan() -> Plan:
    """Three points on a line, and a value that is refused."""
    return plan_sweep("smoke", ["seq_len=64,128", "optimizer_impl=foreach,fused"], "napkin")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep."""
    folder = tmp_path_factory.mktemp("swept")
    (folder / "cells").mkdir()
    sweep = sweep_of(plan(), list(run_cells(plan(), folder)))
    (folder / "sweep.json").write_text(sweep.to_json(), encoding="utf-8")
    return folder


@pytest.fixture
def runs(folder: Path, swept: Path) -> Path:
    """A folder with a run, a sweep and links that lead out of it."""
    inside = folder / "runs"
    for run in (inside / "run", inside / "sweep", folder / "outside"):
        run.mkdir(parents=True)
    profile = {**profile_document(), "warnings": [CANARY]}
    written(folder / "outside", "profile.json", as_json(profile))
    written(inside / "run", "profile.json", as_json(profile_document()))
    written(inside / "sweep", "sweep.json", (swept / "sweep.json").read_bytes())
    (inside / "link").symlink_to(folder / "outside")
    (inside / "linked.json").symlink_to(folder / "outside" / "profile.json")
    return inside


def sweep_document(swept: Path) -> dict[str, Any]:
    return json.loads((swept / "sweep.json").read_bytes())


def broken(document: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """The document with values or bytes changed."""
    return changed(document).map(as_json) | spliced([as_json(document)])


NAMES = ["run", "sweep", "linked.json", "link", "../outside", "..", "/etc/passwd", "run/profile.json", ""]
names = st.sampled_from(NAMES) | texts
targets = st.one_of(
    st.sampled_from(["/", "/report", "/report?run=run", "/report?run=sweep", "/report?run=run&run=run"]),
    st.lists(names, max_size=6).map(
        lambda several: "/report?" + "&".join(f"run={quote(name, errors='replace')}" for name in several)
    ),
    names.map(lambda name: f"/{name}"),
    st.tuples(st.sampled_from(["", "/", "//", "/report?", "http://x/"]), texts).map("".join),
)
headers = st.tuples(
    st.sampled_from(["Host", "host", "Connection", "Content-Length", "Transfer-Encoding", "Expect", "\0"]),
    st.sampled_from([f"127.0.0.1:{PORT}", "localhost", "evil.example", "keep-alive", "5", "chunked", ""])
    | texts,
).map(lambda pair: f"{pair[0]}: {pair[1]}")


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """One to three requests on a connection, mostly well-formed."""
    whole = b""
    for _ in range(draw(st.integers(1, 3))):
        method = draw(st.sampled_from(["GET", "GET", "GET", "HEAD", "POST", "BREW", "", "get"]))
        version = draw(st.sampled_from(["HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/9.9", "HTTP/0.9", "", "x"]))
        lines = [f"{method} {draw(targets)} {version}".rstrip(), *draw(st.lists(headers, max_size=3))]
        if draw(st.integers(0, 3)):
            lines.insert(1, f"Host: 127.0.0.1:{PORT}")
        whole += "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogatepass")
    return draw(spliced([whole], b" \r\n:/?&=%+\0\xff")) if draw(st.booleans()) else whole


@given(request=requests())
@fuzzed
def test_requests(request: bytes, runs: Path, count: Count, capsys: pytest.CaptureFixture[str]) -> None:
    """serve: requests of any method, path, query, version, headers and bytes."""
    asked = Asked(runs)
    count.inputs += 1
    with watched(runs.parent):
        count.refused += asked.status(request) != 200
    assert capsys.readouterr().err == ""


@given(data=st.data())
@fuzzed
def test_served_folders(
    data: st.DataObject, runs: Path, swept: Path, count: Count, capsys: pytest.CaptureFixture[str]
) -> None:
    """serve: folders whose runs, sweeps and snapshots were changed; the list, and a page of each."""
    kind = data.draw(st.sampled_from(["run", "sweep", "snapshot"]))
    if kind == "snapshot":
        written(runs / "run", "snapshot.pickle", data.draw(spliced([PICKLES[2], PICKLES[4]])))
    else:
        path = runs / kind / ("profile.json" if kind == "run" else "sweep.json")
        path.write_bytes(data.draw(broken(profile_document() if kind == "run" else sweep_document(swept))))
    asked = Asked(runs)
    count.inputs += 1
    with watched(runs.parent):
        assert asked.get("/") == 200
        statuses = [asked.get(f"/report?run={quote(entry.name)}") for entry in asked.pages.index.entries()]
    (runs / "run" / "snapshot.pickle").unlink(missing_ok=True)
    count.refused += 422 in statuses
    assert set(statuses) <= {200, 422}
    assert capsys.readouterr().err == ""


# Checkpoints ------------------------------------------------------------------------------------

RECIPE = tiny(precision="fp16-mixed", adapter="lora", warmup_steps=1, steps=2, checkpoint_every=2)
"""Everything that a checkpoint can hold is in one of it: a scaler, buffers, adapters with their config."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float | None]]:
    """The folder of a run with its first checkpoint, after two of five steps; and its losses."""
    folder = tmp_path_factory.mktemp("checkpoints") / "run"
    profile = measure(RECIPE, RunFolder(folder, "tiny", RECIPE), Silent(), CPU, snapshot=False)
    shutil.rmtree(checkpoints(folder / "checkpoints")[-1])  # the one a step before the end
    return folder, profile.step.loss or []


def sealed(checkpoint: Path) -> None:
    """Write a manifest that says that all is as it was written."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in checkpoint.iterdir()
        if path.is_file() and path.name != MANIFEST
    }
    written(checkpoint, MANIFEST, as_json({"format": 1, "files": files}))


def damaged(data: st.DataObject, path: Path) -> None:
    """Change the file at `path` in a way that `data` chooses."""
    content = path.read_bytes()
    match data.draw(st.sampled_from(["bytes", "bytes", "values", "cut", "gone", "link", "folder"])):
        case "values" if path.suffix == ".json":
            path.write_bytes(as_json(data.draw(changed(json.loads(content)))))
        case "cut":
            path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        case "gone":
            path.unlink()
        case "link":
            path.rename(path.parent.parent / "elsewhere")
            path.symlink_to(path.parent.parent / "elsewhere")
        case "folder":
            path.unlink()
            path.mkdir()
        case _:
            path.write_bytes(data.draw(spliced([content])))


@given(data=st.data(), seal=st.booleans())
@fuzzed
def test_checkpoints(
    data: st.DataObject, seal: bool, run: tuple[Path, list[float | None]], folder: Path, count: Count
) -> None:
    """Checkpoints: a file changed, cut, removed or put in, with and without a manifest that fits; resumed."""
    there, losses = run
    here = folder / "run"
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(there, here)
    [checkpoint] = checkpoints(here / "checkpoints")
    files = sorted(checkpoint.iterdir())
    before = {path.name: path.read_bytes() for path in files}
    chosen = data.draw(st.sampled_from([*files, checkpoint / "more", here / "log.jsonl"]))
    if chosen.name == "more":
        chosen.write_bytes(b"")
    else:
        damaged(data, chosen)
    if seal and chosen.name != MANIFEST:
        sealed(checkpoint)
    as_written = all(
        path.is_file() and not path.is_symlink() and path.read_bytes() == before.get(path.name)
        for path in {*files, *checkpoint.iterdir()}
        if path.name != MANIFEST
    )

    def resume() -> StepProfile:
        return measure(RECIPE, RunFolder(None, "tiny", RECIPE, here), Silent(), CPU, snapshot=False)

    profile = attempt(count, folder, resume)
    if profile is None:
        named = here / "log.jsonl" if chosen.parent == here else checkpoint if seal else chosen
        assert chosen.name == MANIFEST or str(named) in count.said
    elif as_written:
        assert profile.step.loss == losses
    else:
        assert seal or chosen.parent == here


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key in a JSON document; of a list as long as a generator's state, its ends."""
    keys = list(document) if isinstance(document, dict) else range(len(document))
    for key in [*keys[:2], *keys[-2:]] if len(keys) > 100 else keys:
        yield document, key
        if isinstance(document[key], dict | list):
            yield from places(document[key])


@given(data=st.data())
@fuzzed
def test_checkpoint_states(
    data: st.DataObject, run: tuple[Path, list[float | None]], folder: Path, count: Count
) -> None:
    """Checkpoints whose state has values replaced, removed, made huge, with a manifest that fits; resumed."""
    here = folder / "run"
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(run[0], here)
    [checkpoint] = checkpoints(here / "checkpoints")
    state = checkpoint / "state.json"
    document = json.loads(state.read_bytes())
    holder, key = data.draw(st.sampled_from(list(places(document))))
    holder[key] = data.draw(junk | changed(holder[key]))
    state.write_bytes(as_json(document))
    sealed(checkpoint)

    def resume() -> None:
        measure(RECIPE, RunFolder(None, "tiny", RECIPE, here), Silent(), CPU, snapshot=False)

    if attempt(count, folder, resume) is None and count.said:
        assert str(checkpoint) in count.said


# Sweeps -----------------------------------------------------------------------------------------


def shown(sweep: Sweep) -> None:
    """Everything that is made of a sweep."""
    sweep.to_json().encode()
    as_csv(sweep).encode()
    as_markdown(sweep).encode()
    sweep_html(sweep).encode()
    with io.StringIO() as text:
        print_sweep(Terminal(file=text, width=80), sweep)
        assert text.getvalue().replace("\n", "").isprintable()


@given(data=st.data())
@fuzzed
def test_sweep_documents(data: st.DataObject, swept: Path, folder: Path, count: Count) -> None:
    """sweep.json: values replaced, removed, made huge, bytes changed; its tables and its page."""
    path = written(folder, "sweep.json", data.draw(broken(sweep_document(swept))))
    attempt(count, folder, lambda: shown(Sweep.read(path)))


@given(data=st.data())
@fuzzed
def test_sweep_cells(data: st.DataObject, swept: Path, folder: Path, count: Count) -> None:
    """Sweeps with a changed cell, run again: it is done anew, or used as it stands."""
    shutil.copytree(swept, folder, dirs_exist_ok=True)
    chosen = data.draw(st.sampled_from(sorted((folder / "cells").iterdir())))
    chosen.write_bytes(data.draw(broken(json.loads(chosen.read_bytes()))))

    def again() -> None:
        rows = list(run_cells(plan(), folder))
        assert {id(row.cell) for row in rows} == {id(cell) for cell in plan().cells}
        shown(sweep_of(plan(), rows))

    attempt(count, folder, again)
