"""A Hub that does not answer: the libraries that load from it take what is in the cache, at once."""

import os
import socket
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download, is_offline_mode
from huggingface_hub.errors import LocalEntryNotFoundError

from harness.data.documents import read_examples
from harness.errors import InputError
from harness.system import hub_or_cache


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Who takes every call and never says a word, in place of the Hub."""
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("a library tries again"))
    monkeypatch.setattr("harness.system.hub.HUB_ANSWERS_S", 0.2)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield


@pytest.mark.usefixtures("silent")
def test_what_is_loaded_meanwhile_asks_nobody() -> None:
    with hub_or_cache("nobody/nothing") as unreached:
        assert unreached
        assert is_offline_mode()
        assert os.environ["HF_HUB_OFFLINE"] == "1"
        with pytest.raises(LocalEntryNotFoundError):
            hf_hub_download("nobody/nothing", "config.json")
    assert not is_offline_mode()
    assert "HF_HUB_OFFLINE" not in os.environ


@pytest.mark.usefixtures("silent")
def test_nobody_is_asked_of_a_folder(tmp_path: Path) -> None:
    with hub_or_cache(str(tmp_path)) as unreached:
        assert unreached == ""
        assert not is_offline_mode()


@pytest.mark.usefixtures("silent")
def test_a_data_set_without_a_network_is_one_sentence() -> None:
    pytest.importorskip("datasets")
    with pytest.raises(InputError, match=r"nobody/rows.*the Hub cannot be reached"):
        list(read_examples("nobody/rows", paragraphs=False))
