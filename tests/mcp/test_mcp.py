"""`harness mcp` as a program meets it: the SDK's own client on the server's stdin and stdout."""

import asyncio
import json
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import harness
from tests.support.commands import Call
from tests.support.places import MODELS, ROOT
from tests.support.reported import simulated_run, write_hand_made

pytest.importorskip("mcp", reason="`harness mcp` needs the extra finetune-harness[mcp]")
from mcp import Client, StdioServerParameters

SMALL = {"seq_len": 16, "micro_batch_size": 1}
Answer = tuple[bool, str, dict[str, Any] | None]
"""Whether it is an error, the text, and the structured content."""

WATCHED = """
import os, sys
log = open(sys.argv[1], "w", buffering=1)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
def watch(event, arguments):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
        if isinstance(arguments[0], str) and arguments[0] != os.devnull:  # a number is open already
            log.write(f"{event} {arguments[0]}\\n")
    elif event in ("os.rename", "os.link", "os.symlink", "os.truncate", "os.chmod"):
        log.write(f"{event} {arguments[0]}\\n")
    elif event in ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.exec", "os.posix_spawn"):
        if event == "subprocess.Popen" and arguments[1][0] == "git":  # which commit this checkout is
            return
        if event == "subprocess.Popen" and arguments[1] == ["/sbin/ldconfig", "-p"]:
            return  # prints the linker's list of libraries, for cuda.pathfinder, which PyTorch 2.15 imports
        log.write(f"{event} {arguments[1:2]}\\n")
sys.addaudithook(watch)
sys.argv = ["harness", *sys.argv[2:]]
from harness.cli import script
script()
"""
"""The server under Python's own audit events: what it opens to write, renames, connects to and starts."""


def ask(
    folders: Sequence[Path],
    *questions: tuple[str, dict[str, Any]],
    command: Sequence[str] = ("-m", "harness"),
    cwd: Path | None = None,
    **environment: str,
) -> tuple[list[Answer], Any]:
    """The answers of one server, and its tools."""

    async def conversation() -> tuple[list[Answer], Any]:
        server = StdioServerParameters(
            command=sys.executable,
            args=[*command, "mcp", *map(str, folders)],
            env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
            cwd=cwd,
        )
        async with Client(server, read_timeout_seconds=300) as client:
            answers: list[Answer] = []
            for name, arguments in questions:
                result = await client.call_tool(name, arguments)
                (content,) = result.content
                answers.append((bool(result.is_error), content.text, result.structured_content))  # type: ignore[union-attr]
            return answers, (await client.list_tools()).tools

    # in a thread: a browser's tests may have left a loop running in this one
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(conversation())).result()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, a snapshot that PyTorch could have recorded, a model and recipes; and links out of it."""
    here = tmp_path_factory.mktemp("given")
    outside = tmp_path_factory.mktemp("outside")
    simulated_run(here / "a-run")
    write_hand_made(here / "recorded")
    (here / "llama.json").write_text((MODELS / "llama.json").read_text())
    (here / "mine.yaml").write_text("# Mine\nmodel: llama.json\nseq_len: 16\n")
    (outside / "secret.json").write_text('{"model_type": "llama", "secret": "of nobody\'s business"}')
    (outside / "secret.yaml").write_text("model: smoke\n")
    (here / "link.yaml").symlink_to(outside / "secret.yaml")
    (here / "linked").symlink_to(outside)
    (here / "checkpoint").mkdir()
    (here / "checkpoint/config.json").symlink_to(outside / "secret.json")
    (here / "points-out.yaml").write_text(f"model: {outside}/secret.json\n")
    (here / "climbs-out.yaml").write_text(f"model: ../{outside.name}/secret.json\n")
    (here / "data-out.yaml").write_text("model: llama.json\ndata: /etc/passwd\n")
    (here / "trusts.yaml").write_text("model: llama.json\ntrust_remote_code: true\n")
    (here / "of-the-hub.yaml").write_text("model: someone/else\n")
    (here / "broken.yaml").write_text("model: [\n")
    (here / "nothing.jsonl").write_text('{"text": ""}\n')
    (here / "broken").mkdir()
    (here / "broken/profile.json").write_text("{")
    (here / "broken/snapshot.pickle").write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    return here


def test_every_tool_answers(folder: Path, call: Call):
    """That its words and numbers are those of the command and of Python: tests/mcp/test_same_answers.py."""
    recipe = {"recipe": "mine.yaml", "overrides": SMALL}
    prices = {**recipe, "prices": {"l4": 0.7}}
    asked = {
        "recipes": ("recipes", {}),
        "files": ("files", {}),
        "napkin": ("napkin", {"recipe": "smoke"}),
        "simulate": ("simulate", {**recipe, "memory": "16GiB", "allocator": "expandable_segments:True"}),
        "fit": ("fit", {"recipe": "mistral-7b-qlora", "memory": "16GiB", "quick": True}),
        "shard": ("shard", {**recipe, "gpus": 2}),
        "table": ("hardware", {}),
        "offers": ("hardware", prices),
        "best": ("hardware", {**prices, "best": True}),
        "report": ("report", {"paths": ["a-run"]}),
        "run": ("snapshot", {"path": "a-run"}),
        "recorded": ("snapshot", {"path": "recorded"}),
        "same": ("diff", {"first": "a-run", "second": "a-run", "fail_above": "0"}),
    }
    answers, tools = ask([folder], *asked.values())
    assert [tool.name for tool in tools] == [
        *("recipes", "files", "napkin", "simulate", "fit", "formula", "shard"),
        *("hardware", "report", "snapshot", "diff"),
    ]
    assert all(tool.annotations.read_only_hint for tool in tools)
    assert all(len(tool.description) > 40 for tool in tools)
    assert [text for is_error, text, _ in answers if is_error] == []
    said = {name: content or {} for name, (_, _, content) in zip(asked, answers, strict=True)}
    assert "smoke" in said["recipes"]["recipes"]
    assert said["files"]["runs"] == [str(folder.resolve() / name) for name in ("a-run", "broken")]
    assert str(folder.resolve() / "recorded/snapshot.pickle") in said["files"]["snapshots"]
    assert str(folder.resolve() / "mine.yaml") in said["files"]["recipes"]
    assert re.findall("secret|link", answers[1][1]) == []
    assert said["simulate"]["answer"].startswith("mine: fits in the 16.00 GiB of h100")
    assert "FSDP2" in said["shard"]["answer"]
    assert {one["name"] for one in said["table"]["hardware"]} > {"h100", "l4"}
    l4, best_l4 = (
        next(offer for offer in said[name]["offers"] if offer["name"] == "l4") for name in ("offers", "best")
    )
    assert (l4["fits"], l4["price_per_hour"]) == (True, 0.7)
    assert best_l4["micro_batch_size"] >= 1
    assert best_l4["tokens_per_s"] >= 0.98 * l4["tokens_per_s"]
    first_table = said["report"]["tables_in_markdown"].strip().partition("\n\n")[0]
    assert first_table in call("report", folder / "a-run", "--markdown")[1]
    assert said["same"]["beyond"] == []

    run = harness.load_profile(folder / "a-run")
    known = {name: size for name, size in run.memory.at_peak.model_dump().items() if size}
    assert said["run"]["at_peak"] == known
    assert said["run"]["peak_allocated_bytes"] == run.memory.peak_allocated_bytes
    assert said["recorded"]["largest"][0]["stack"]
    for name, place in (("run", "a-run"), ("recorded", "recorded")):
        sentences = said[name]["answer"]
        assert sentences == harness.report(folder / place)._sections()[0].answer[: len(sentences)]
        shown = " ".join(call("snapshot", "show", folder / place)[1].split())
        assert all(sentence in shown for sentence in sentences)


HUGE = "x" * 100_000
REFUSED = [
    # a path that is not in the folders, however it is written
    ("napkin", {"recipe": "/etc/passwd"}, "is not in the folders that this server reads"),
    ("napkin", {"recipe": "../outside0/secret.yaml"}, "is not in the folders that this server reads"),
    ("napkin", {"recipe": "link.yaml"}, "is not in the folders that this server reads"),
    ("napkin", {"recipe": "linked/secret.yaml"}, "is not in the folders that this server reads"),
    ("napkin", {"recipe": "a-run/../../outside0/secret.yaml"}, "is not in the folders"),
    ("napkin", {"recipe": "~/.bashrc"}, "is not in the folders"),
    ("napkin", {"recipe": "mine.yaml\0"}, "there is no recipe and no model 'mine.yaml\\x00'"),
    ("napkin", {"recipe": "./mine.yaml\0"}, "is not in the folders"),
    ("report", {"paths": ["linked"]}, "is not in the folders"),
    ("report", {"paths": ["."]}, "is a link to somewhere outside"),
    ("snapshot", {"path": "/proc/self/environ"}, "is not in the folders"),
    # a recipe whose files are not
    ("napkin", {"recipe": "points-out.yaml"}, "model: give a model of recipes/models, for this server"),
    ("napkin", {"recipe": "climbs-out.yaml"}, "model: give a model of recipes/models, for this server"),
    ("napkin", {"recipe": "data-out.yaml"}, "data: give synthetic, for this server asks no network"),
    ("simulate", {"recipe": "of-the-hub.yaml"}, "model: give a model of recipes/models, for this server"),
    ("napkin", {"recipe": "smoke", "overrides": {"model": "checkpoint"}}, "is a link to somewhere outside"),
    ("napkin", {"recipe": "smoke", "overrides": {"model": "/etc/passwd"}}, "is not in the folders"),
    ("napkin", {"recipe": "smoke", "overrides": {"data": "file:///etc/passwd"}}, "is not in the folders"),
    ("simulate", {"recipe": "trusts.yaml"}, "trust_remote_code: this server runs no code"),
    ("simulate", {"recipe": "smoke", "overrides": {"trust_remote_code": True}}, "this server runs no code"),
    # what is wrong is said as the commands say it
    ("napkin", {"recipe": "smok"}, "there is no recipe and no model 'smok'. Did you mean smoke?"),
    ("napkin", {"recipe": ""}, "is not in the folders"),
    ("napkin", {"recipe": HUGE}, "is not in the folders"),
    ("napkin", {"recipe": "smoke", "overrides": {"seqlen": 4}}, "no field seqlen. Did you mean seq_len?"),
    ("napkin", {"recipe": "smoke", "overrides": {HUGE: HUGE}}, "there is no field xxx"),
    ("simulate", {"recipe": "smoke", "overrides": {"compile": True}}, "compile: true cannot be simulated"),
    ("hardware", {"recipe": "smoke", "overrides": {"data": "nothing.jsonl"}}, "leaves nothing to predict"),
    ("diff", {"first": "a-run", "second": "/etc/passwd"}, "is not in the folders"),
    ("diff", {"first": "a-run", "second": "mine.yaml"}, "mine.yaml"),
    ("napkin", {"recipe": "broken.yaml"}, "broken.yaml"),
    ("report", {"paths": ["broken"]}, "is not JSON"),
    ("snapshot", {"path": "broken/snapshot.pickle"}, "broken/snapshot.pickle"),
    ("report", {"paths": []}, "at least 1 item"),
    ("report", {"paths": ["a-run"] * 21}, "at most 20 items"),
    ("napkin", {}, "recipe: field required."),
    ("napkin", {"recipe": 3}, "recipe=3: input should be a valid string."),
    (
        "napkin",
        {"recipe": "smoke", "seq_len": 4096},
        "seq_len is a field of the recipe: give it in overrides",
    ),
    ("napkin", {"recipe": "smoke", "hardwear": "l4"}, "no argument hardwear. Did you mean hardware?"),
    ("recipes", {"all": True}, "there is no argument all."),
    ("hardware", {"best": True}, "overrides, prices, best and tokens are for a recipe"),
    ("run", {"recipe": "smoke"}, "Unknown tool"),
]


def test_what_is_refused_is_an_error_of_the_tool_with_our_sentence(folder: Path):
    answers, _ = ask([folder], *((name, arguments) for name, arguments, _ in REFUSED))
    for (name, arguments, said), (is_error, text, content) in zip(REFUSED, answers, strict=True):
        assert is_error, (name, str(arguments)[:200], text[:500])
        assert said in text, (name, str(arguments)[:200], text)
        assert content is None
        assert "Traceback" not in text
        assert "nobody's business" not in text
        assert len(text) < 3000


def test_nothing_is_written_connected_or_started(folder: Path, tmp_path: Path):
    """By Python's audit events, and by what is there afterwards. `tempfile` tries once if it could write."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    before = sorted(folder.rglob("*"))
    watched = tmp_path / "watched.py"
    watched.write_text(WATCHED)
    log = tmp_path / "log"
    answers, _ = ask(
        [folder],
        ("napkin", {"recipe": "mine.yaml"}),
        ("simulate", {"recipe": "mine.yaml"}),
        ("formula", {"recipe": "mine.yaml"}),
        ("report", {"paths": ["a-run", "recorded"]}),
        ("snapshot", {"path": "recorded"}),
        command=(str(watched), str(log)),
        cwd=here,
        HOME=str(home),
        TMPDIR=str(here),
    )
    assert [text for is_error, text, _ in answers if is_error] == []
    assert log.exists()
    said = log.read_text().splitlines()
    assert len(said) <= 1
    assert all(re.fullmatch(rf"open {re.escape(str(here))}/\w{{8}}", line) for line in said), said
    assert [*home.iterdir(), *here.iterdir()] == []
    assert sorted(folder.rglob("*")) == before


def test_a_connection_is_refused_whoever_makes_it():
    import socket
    import subprocess

    program = (
        "import sys, socket\n"
        "from harness.mcp.server import _no_network\n"
        "sys.addaudithook(_no_network)\n"
        "for call in (lambda: socket.create_connection(('127.0.0.1', int(sys.argv[1]))),\n"
        "             lambda: socket.socket().connect(('127.0.0.1', int(sys.argv[1])))):\n"
        "    try: call(); print('connected')\n"
        "    except Exception as error: print(error)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-c", program, port], capture_output=True, text=True, cwd=ROOT, check=False
        )
    assert done.stdout.splitlines() == ["this server reaches no network."] * 2, done.stderr


def test_the_guide_s_configuration_is_of_this_command():
    text = (ROOT / "docs/mcp.md").read_text()
    (block,) = [part.partition("```")[0] for part in text.split("```json\n")[1:]]
    (server,) = json.loads(block)["mcpServers"].values()
    assert server["command"] == "harness"
    assert server["args"][0] == "mcp"
    assert all(os.path.isabs(path) for path in server["args"][1:])
