"""A Hugging Face id: its config from the cache, or fetched once from a hub, or a sentence that says why."""

import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from harness.architecture.config_file import MAX_CONFIG_BYTES
from harness.architecture.model_id import config_here, find_config
from harness.architecture.model_shape import load_shape
from harness.checkpoint.same_recipe import content_of
from harness.errors import InputError
from harness.recipe.recipe import Recipe
from harness.sweep.folder import cell_facts
from harness.sweep.plan import Cell
from harness.training.model_config import load_config

QWEN = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """A hub on this machine: /owner/name/resolve/main/config.json, and what it answers for other names."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        type(self).asked.append(f"{self.command} {self.path}")
        owner = self.path.split("/")[1]
        content = json.dumps(QWEN).encode()
        if owner == "huge":
            content = b" " * (MAX_CONFIG_BYTES + 1)
        errors = {
            "gated": (403, "GatedRepo"),
            "nobody": (404, "RepoNotFound"),
            "adapters": (404, "EntryNotFound"),
        }
        status, code = errors.get(owner, (200, None))
        self.send_response(status)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", '"1"')
        if code is not None:
            self.send_header("X-Error-Code", code)
            content = b""
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the hub is asked; its address and an empty cache are where huggingface_hub looks."""
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for name, value in {
        "ENDPOINT": address,
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_TELEMETRY": True,  # once a day and process, the first asks which programs are agents
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
    }.items():  # huggingface_hub has read its environment when it was imported
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    yield Hub.asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_config_is_fetched_once_and_nothing_else(asked: list[str]) -> None:
    assert load_shape("someone/model").layers == 3
    assert {line.split()[1] for line in asked} == {"/someone/model/resolve/main/config.json"}
    before = len(asked)
    assert load_shape("someone/model").layers == 3
    assert len(asked) == before


def test_every_command_reads_the_same_config(asked: list[str]) -> None:
    """What napkin reads, transformers builds from."""
    shape = load_shape("someone/model")
    config = load_config(Recipe(model="someone/model"))
    assert (config.model_type, config.hidden_size) == (shape.family, shape.hidden)
    assert json.loads(find_config("someone/model").read_text()) == QWEN


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gated/model", ("gated", "hf auth login")),
        ("nobody/model", ("no such model", "logged in")),
        ("adapters/model", ("no config.json",)),
        ("huge/model", (f"{MAX_CONFIG_BYTES:,} bytes",)),
    ],
)
def test_what_cannot_be_fetched_is_one_sentence(asked: list[str], model: str, words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as refused:
        load_shape(model)
    assert all(word in str(refused.value) for word in (model, *words))
    assert not any(line.startswith("GET /huge") for line in asked)


@pytest.mark.parametrize("listening", [False, True])
def test_no_network_is_one_sentence(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listening: bool
) -> None:
    """Nobody listens, or who listens says nothing: no waiting for the library's five tries."""
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("the library tries again"))
    monkeypatch.setattr("harness.system.hub.HUB_ANSWERS_S", 0.2)
    (cached := tmp_path / "hub/models--here--already/snapshots/1").mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listening:
            silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        with pytest.raises(InputError, match=r"cannot be reached.*an id in the cache .here/already."):
            load_shape("someone/model")
    assert asked == []


@pytest.mark.parametrize("value", ["1", "ON", "yes", "true"])
def test_offline_asks_nobody(asked: list[str], monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    for read in (load_shape, lambda model: load_config(Recipe(model=model))):
        with pytest.raises(InputError, match=r"models is llama-3.1-70b\. HF_HUB_OFFLINE forbids"):
            read("meta-llama/Llama-3.3-70B-Instruct")
    assert asked == []


@pytest.mark.parametrize(
    "model", ["llama-3.1-8", "./no/such", "no-such.json", "a b/c", "a/b/c", "../x/y", "x/" + "*", "a" * 5000]
)
def test_what_is_no_id_is_not_looked_for(asked: list[str], model: str) -> None:
    with pytest.raises(InputError, match="no such"):
        load_shape(model)
    assert asked == []


def test_a_config_below_home_is_the_same_for_all_that_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    config = tmp_path / "mine" / "config.json"
    config.write_text(json.dumps(QWEN))
    monkeypatch.setenv("HOME", str(tmp_path))
    digest = hashlib.sha256(config.read_bytes()).hexdigest()
    for model in ("~/mine", "~/mine/config.json", str(tmp_path / "mine")):
        recipe = Recipe(model=model)
        assert find_config(model) == config_here(model) == config
        assert (
            content_of(recipe)["model"] == cell_facts(Cell({}, recipe, "h100"), "napkin")["model"] == digest
        )
        assert (load_config(recipe).num_hidden_layers, load_shape(model).layers) == (3, 3)


def test_a_folder_a_file_and_a_name_come_first(asked: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    assert (
        find_config(str(tmp_path)) == find_config(str(tmp_path / "config.json")) == tmp_path / "config.json"
    )
    assert find_config("llama-3.1-8b").name == "llama-3.1-8b.json"
    assert asked == []
