"""`harness mcp` as a program meets it: the SDK's own client on the server's stdin and stdout."""

from __future__ import annotations

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
from harness.units import in_gib
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


def test_every_tool_answers_as_the_command_does(folder: Path):
    recipe = {"recipe": "mine.yaml", "overrides": SMALL}
    (recipes, files, napkin, simulated, fits, table, offers, best, report, snapshot, named), tools = ask(
        [folder],
        ("recipes", {}),
        ("files", {}),
        ("napkin", {**recipe, "hardware": "l4"}),
        ("simulate", {**recipe, "memory": "16GiB", "allocator": "expandable_segments:True"}),
        ("fit", {"recipe": "mistral-7b-qlora", "memory": "16GiB", "quick": True}),
        ("hardware", {}),
        ("hardware", {**recipe, "prices": {"l4": 0.7}}),
        ("hardware", {**recipe, "prices": {"l4": 0.7}, "best": True}),
        ("report", {"paths": ["a-run"]}),
        ("snapshot", {"path": "recorded/snapshot.pickle"}),
        ("napkin", {"recipe": "smoke"}),
    )
    assert [tool.name for tool in tools] == [
        *("recipes", "files", "napkin", "simulate", "fit", "formula", "shard"),
        *("hardware", "report", "snapshot", "diff"),
    ]
    assert all(tool.annotations.read_only_hint for tool in tools)
    assert all(len(tool.description) > 40 for tool in tools)
    everything = (recipes, files, napkin, simulated, fits, table, offers, best, report, snapshot, named)
    assert [text for is_error, text, _ in everything if is_error] == []
    said = [content or {} for _, _, content in everything]
    assert "smoke" in said[0]["recipes"]
    assert said[1]["runs"] == [str(folder.resolve() / name) for name in ("a-run", "broken")]
    assert str(folder.resolve() / "recorded/snapshot.pickle") in said[1]["snapshots"]
    assert str(folder.resolve() / "mine.yaml") in said[1]["recipes"]
    assert re.findall("secret|link", files[1]) == []
    expected = harness.napkin(folder / "mine.yaml", hardware="l4", **SMALL)
    assert said[2]["profile"]["memory"] == expected.memory.model_dump(mode="json")
    assert said[2]["answer"].startswith("mine: fits in the ")
    exact = harness.simulate(
        folder / "mine.yaml", memory="16GiB", allocator="expandable_segments:True", **SMALL
    )
    assert said[3]["profile"]["memory"] == exact.memory.model_dump(mode="json")
    quick = harness.fit("mistral-7b-qlora", memory="16GiB", quick=True)
    assert said[4] == {"answer": str(quick), **quick.as_json()}
    assert {one["name"] for one in said[5]["hardware"]} > {"h100", "l4"}
    (l4,) = [offer for offer in said[6]["offers"] if offer["name"] == "l4"]
    assert l4["fits"]
    assert l4["price_per_hour"] == 0.7
    (best_l4,) = [offer for offer in said[7]["offers"] if offer["name"] == "l4"]
    assert best_l4["micro_batch_size"] >= 1
    assert best_l4["tokens_per_s"] >= 0.98 * l4["tokens_per_s"]
    assert any("peak" in sentence.lower() for sentence in said[8]["answer"]["a-run"])
    assert "| " in said[8]["tables_in_markdown"]
    assert said[9]["peak_allocated_bytes"] > 0
    assert sum(size or 0 for size in said[9]["at_peak"].values()) == said[9]["peak_allocated_bytes"]
    assert said[9]["largest"][0]["stack"]


def test_the_command_the_api_the_tools_and_the_report_say_the_same(folder: Path, call: Call):
    mine, words = folder / "mine.yaml", [f"{name}={value}" for name, value in SMALL.items()]
    recipe = {"recipe": "mine.yaml", "overrides": SMALL, "hardware": "l4", "memory": "16GiB"}
    (napkin, simulated, fits, *snapshots), _ = ask(
        [folder],
        ("napkin", recipe),
        ("simulate", {**recipe, "allocator": "expandable_segments:True"}),
        ("fit", {**recipe, "quick": True}),
        ("snapshot", {"path": "a-run"}),
        ("snapshot", {"path": "recorded"}),
    )
    by_tool = [content or {} for _, _, content in (napkin, simulated, fits)]
    at = {"hardware": "l4", "memory": "16GiB", **SMALL}
    by_api = [harness.napkin(mine, **at), harness.simulate(mine, allocator="expandable_segments:True", **at)]
    place = (mine, *words, "hardware=l4", "--memory", "16GiB", "--json")
    by_command = [
        harness.StepProfile.from_json(call(*command, *place)[1], "stdout")
        for command in (("napkin",), ("simulate", "--allocator", "expandable_segments:True"))
    ]
    for tool, api, command in zip(by_tool[:2], by_api, by_command, strict=True):
        assert tool["profile"]["memory"] == api.memory.model_dump(mode="json")
        assert api.memory == command.memory
        assert harness.report(api)._sections()[0].answer[0].rstrip(".").lower() in tool["answer"].lower()
    quick = harness.fit(mine, quick=True, **at).as_json()
    assert {name: by_tool[2][name] for name in quick} == json.loads(json.dumps(quick))
    assert json.loads(call("fit", "--quick", *place)[1]) == json.loads(json.dumps(quick))

    run = harness.load_profile(folder / "a-run")
    known = {name: size for name, size in run.memory.at_peak.model_dump().items() if size}
    assert (snapshots[0][2] or {})["at_peak"] == known
    assert (snapshots[0][2] or {})["peak_allocated_bytes"] == run.memory.peak_allocated_bytes
    for name, (_, _, content) in zip(("a-run", "recorded"), snapshots, strict=True):
        said = content or {}
        assert said["answer"] == harness.report(folder / name)._sections()[0].answer[: len(said["answer"])]
        shown = " ".join(call("snapshot", "show", folder / name)[1].split())
        assert all(sentence in shown for sentence in said["answer"])


def test_hardware_formula_report_and_diff_say_what_the_simulation_says(folder: Path, call: Call):
    mine, words = folder / "mine.yaml", [f"{name}={value}" for name, value in SMALL.items()]
    recipe = {"recipe": "mine.yaml", "overrides": SMALL, "prices": {"l4": 0.7}}
    (offers, page), _ = ask([folder], ("hardware", recipe), ("report", {"paths": ["a-run"]}))
    at: dict[str, Any] = {"hardware": "l4", **SMALL}
    simulated = harness.simulate(mine, **at)
    by_command = json.loads(call("hardware", mine, *words, "--price", "l4=0.7", "--json")[1])
    assert (offers[2] or {})["offers"] == by_command
    (l4,) = [offer for offer in by_command if offer["name"] == "l4"]
    assert l4["required_bytes"] == simulated.memory.process_bytes
    assert l4["tokens_per_s"] == pytest.approx(simulated.step.tokens_per_s, rel=1e-6)
    formula = json.loads(call("formula", mine, *words, "hardware=l4", "--json")[1])
    assert formula["peak_allocated_bytes"] == simulated.memory.peak_allocated_bytes

    (folder / "now.json").write_text(simulated.to_json())
    told = call("diff", folder / "now.json", folder / "now.json")[1]
    assert f"peak allocated: {in_gib(simulated.memory.peak_allocated_bytes)}, the same to the byte" in told
    report = harness.report(folder / "a-run")
    told = (page[2] or {})["answer"]["a-run"]
    sentences = report._sections()[0].answer
    assert 3 <= len(told) == len([one for one in told if one in sentences])  # the server opens no model
    first_table = (page[2] or {})["tables_in_markdown"].strip().partition("\n\n")[0]
    assert first_table in call("report", folder / "a-run", "--markdown")[1]


def test_formula_shard_and_diff_answer_as_the_commands_do(folder: Path, call: Call):
    """And keep nothing, though formulas are kept where a command asks for them."""
    mine, words = folder / "mine.yaml", [f"{name}={value}" for name, value in SMALL.items()]
    recipe = {"recipe": "mine.yaml", "overrides": SMALL, "hardware": "l4"}
    larger = harness.simulate(mine, hardware="l4", seq_len=512, micro_batch_size=1)
    (folder / "larger.json").write_text(larger.to_json())
    cache = folder.parent / "cache"
    cache.mkdir()
    two = {"first": "a-run", "second": "larger.json"}
    answers, _ = ask(
        [folder],
        ("formula", recipe),
        ("shard", {**recipe, "gpus": 2}),
        ("diff", {**two, "fail_above": "5%"}),
        XDG_CACHE_HOME=str(cache),
    )
    assert [text for is_error, text, _ in answers if is_error] == []
    assert list(cache.iterdir()) == []
    formula, shard, diff = ({**(content or {})} for _, _, content in answers)
    place = (mine, *words, "hardware=l4")
    paths = (str(folder / "a-run"), str(folder / "larger.json"))
    assert formula.pop("answer") == call("formula", *place)[1].rstrip()
    assert formula == json.loads(call("formula", *place, "--json")[1])
    assert shard["strategies"] == json.loads(call("shard", *place, "--gpus", "2", "--json")[1])
    assert "FSDP2" in shard["answer"]
    status, by_command, _ = call("diff", *paths, "--fail-above", "5%", "--json")
    assert status == 5
    expected = json.loads(by_command)
    assert {name: diff[name] for name in expected} == {**expected, **two}
    assert diff["beyond"]


HUGE = "x" * 100_000
REFUSED = [
    # a path that is not in the folders, however it is written
    ("napkin", {"recipe": "/etc/passwd"}, "is not in the folders that this server reads"),
    ("napkin", {"recipe": "../outside0/secret.yaml"}, "is not in the folders that this server reads"),
    ("napkin", {"recipe": "link.yaml"}, "is not in the folders that this server reads"),
    ("napkin", {"recipe": "linked/secret.yaml"}, "is not in the folders that this server reads"),
    ("napkin", {"recipe": "a-run/../../outside0/secret.yaml"}, "is not in the folders"),
    ("napkin", {"recipe": "~/.bashrc"}, "is not in the folders"),
    ("napkin", {"recipe": "mine.yaml\0"}, "there is no recipe 'mine.yaml\\x00'"),
    ("napkin", {"recipe": "./mine.yaml\0"}, "is not in the folders"),
    ("report", {"paths": ["linked"]}, "is not in the folders"),
    ("report", {"paths": ["."]}, "is a link to somewhere outside"),
    ("snapshot", {"path": "/proc/self/environ"}, "is not in the folders"),
    # a recipe whose files are not
    (
        "napkin",
        {"recipe": "points-out.yaml"},
        "model: give a model of recipes/models, for this server asks no",
    ),
    (
        "napkin",
        {"recipe": "climbs-out.yaml"},
        "model: give a model of recipes/models, for this server asks no",
    ),
    ("napkin", {"recipe": "data-out.yaml"}, "data: give synthetic, for this server asks no network"),
    (
        "simulate",
        {"recipe": "of-the-hub.yaml"},
        "model: give a model of recipes/models, for this server asks no",
    ),
    (
        "napkin",
        {"recipe": "smoke", "overrides": {"model": "checkpoint"}},
        "'config.json' is a link to somewhere",
    ),
    ("napkin", {"recipe": "smoke", "overrides": {"model": "/etc/passwd"}}, "is not in the folders"),
    ("napkin", {"recipe": "smoke", "overrides": {"data": "file:///etc/passwd"}}, "is not in the folders"),
    ("simulate", {"recipe": "trusts.yaml"}, "trust_remote_code: this server runs no code"),
    ("simulate", {"recipe": "smoke", "overrides": {"trust_remote_code": True}}, "this server runs no code"),
    # what is wrong is said as the commands say it
    ("napkin", {"recipe": "smok"}, "there is no recipe 'smok'. Did you mean smoke?"),
    ("napkin", {"recipe": ""}, "is not in the folders"),
    ("napkin", {"recipe": HUGE}, "is not in the folders"),
    (
        "napkin",
        {"recipe": "smoke", "overrides": {"seqlen": 4}},
        "there is no field seqlen. Did you mean seq_len?",
    ),
    (
        "napkin",
        {"recipe": "smoke", "overrides": {"seq_len": [[[]]]}},
        "overrides: seq_len: [[[]]] is not possible",
    ),
    ("napkin", {"recipe": "smoke", "overrides": {HUGE: HUGE}}, "there is no field xxx"),
    ("napkin", {"recipe": "smoke", "hardware": "h1000"}, "there is no h1000 in the table"),
    ("napkin", {"recipe": "smoke", "memory": "much"}, "write a size such as 16GiB"),
    ("simulate", {"recipe": "smoke", "overrides": {"compile": True}}, "compile: true cannot be simulated"),
    ("hardware", {"recipe": "smoke", "overrides": {"data": "nothing.jsonl"}}, "leaves nothing to predict"),
    ("hardware", {"recipe": "smoke", "prices": {"l4": -1}}, "give a positive number per hour"),
    ("formula", {"recipe": "smoke", "overrides": {"compile": True}}, "compile: true cannot be simulated"),
    ("shard", {"recipe": "smoke", "gpus": 0}, "it must be at least 1"),
    ("shard", {"recipe": "smoke", "gpus": 12}, "hybrid sharding needs whole groups of 8"),
    ("diff", {"first": "a-run", "second": "/etc/passwd"}, "is not in the folders"),
    ("diff", {"first": "a-run", "second": "mine.yaml"}, "mine.yaml"),
    ("diff", {"first": "a-run", "second": "a-run", "fail_above": "much"}, "give a percentage as in 5%"),
    ("napkin", {"recipe": "broken.yaml"}, "broken.yaml"),
    ("report", {"paths": ["broken"]}, "is not JSON"),
    ("snapshot", {"path": "broken/snapshot.pickle"}, "broken/snapshot.pickle"),
    ("report", {"paths": []}, "at least 1 item"),
    ("report", {"paths": ["a-run"] * 21}, "at most 20 items"),
    ("napkin", {}, "Field required"),
    ("napkin", {"recipe": 3}, "valid string"),
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


def test_a_folder_that_is_none_is_refused(call: Call):
    status, _, err = call("mcp", "nothing")
    assert status == 2
    assert "is no folder. Give folders of runs" in err


def test_the_guide_s_configuration_is_of_this_command():
    text = (ROOT / "docs/mcp.md").read_text()
    (block,) = [part.partition("```")[0] for part in text.split("```json\n")[1:]]
    (server,) = json.loads(block)["mcpServers"].values()
    assert server["command"] == "harness"
    assert server["args"][0] == "mcp"
    assert all(os.path.isabs(path) for path in server["args"][1:])
