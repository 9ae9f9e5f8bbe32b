"""Where a profile says it comes from, and what it must not say."""

import json
import os
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import harness
from harness.system import installed_version, provenance
from harness.system import versions as module
from tests.support.places import ROOT


def test_versions_and_settings_are_those_in_force(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    found = provenance()
    assert found["settings"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert found["versions"]["torch"] == version("torch")
    assert "no-such-package" not in found["versions"]
    assert found["python"] == platform.python_version()
    assert found["harness"] == harness.__version__
    age = datetime.now(UTC) - datetime.fromisoformat(found["time"])
    assert 0 <= age.total_seconds() < 60


def test_nothing_else_of_the_environment_or_the_machine_is_told(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_the_user")
    told = json.dumps(provenance())
    assert "secret" not in told
    assert str(Path.home()) not in told or str(Path.home()) == "/"
    assert str(ROOT) not in told
    assert os.uname().nodename not in re.findall(r"[\w-]+", told)


def test_commit_of_the_checkout(monkeypatch, tmp_path):
    """In a repository made here: its commit, clean, then changed, then no repository at all."""
    package = tmp_path / "harness"
    package.mkdir()
    monkeypatch.setattr(module, "PACKAGE", package)
    assert (provenance()["git_commit"], provenance()["git_dirty"]) == (None, None)

    def git(*arguments: str) -> str:
        who = "-c user.name=a -c user.email=a@b -c commit.gpgsign=false -c init.defaultBranch=main"
        return os.popen(f"git -C {tmp_path} {who} {' '.join(arguments)} 2>&1").read().strip()

    git("init")
    assert (provenance()["git_commit"], provenance()["git_dirty"]) == (None, None)  # nothing is committed yet
    (package / "file").write_text("x")
    git("add .")
    git("commit --no-verify -m first")
    found = provenance()
    assert re.fullmatch(r"[0-9a-f]{40}", found["git_commit"])
    assert (found["git_commit"], found["git_dirty"]) == (git("rev-parse HEAD"), False)
    (package / "file").write_text("y")
    assert provenance()["git_dirty"] is True


def test_a_missing_git_is_no_failure(monkeypatch):
    monkeypatch.setenv("PATH", "")
    found = provenance()
    assert found["git_commit"] is None
    assert found["git_dirty"] is None


def test_installed_version():
    assert installed_version("torch") == version("torch")
    assert installed_version("no-such-package") is None
