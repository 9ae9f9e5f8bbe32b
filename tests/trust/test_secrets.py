"""What a user keeps secret reaches no file and no terminal; code of strangers runs only when told, in red."""

import pytest

from harness.errors import HarnessError, InputError
from harness.recipe.file import load_recipe
from harness.system.streams import warn_of_trusted_code
from tests.support.commands import Call
from tests.support.places import MODELS
from tests.support.trust_report import Tried

CANARY = "cAnArY0f"
ENVIRONMENT = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    *("AWS_SESSION_TOKEN", "OPENAI_API_KEY", "GITHUB_TOKEN", "DB_PASSWORD", "https_proxy", "PIP_INDEX_URL"),
)


@pytest.fixture
def call(call: Call, monkeypatch, tmp_path):
    """Run a command with a secret in every place; (exit status, all that it printed)."""
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, f"https://u:{CANARY}@127.0.0.1:9/{CANARY}")
    recipe = f"model: {MODELS / 'llama.json'}\nprecision: fp32\nseq_len: 16\nwarmup_steps: 1\nsteps: 1\n"
    (tmp_path / "mine.yaml").write_text(recipe)

    def command(*arguments: str) -> tuple[int, str]:
        status, out, err = call(*arguments)
        return status, out + err

    return command


def test_no_secret_reaches_a_file_or_the_terminal(call, tmp_path, tried: Tried) -> None:
    commands = [
        ("run", "mine.yaml", "--out", "run"),
        ("simulate", "mine.yaml", "--out", "simulated"),
        ("snapshot", "to-json", "run/snapshot.pickle", "--out", "snapshot.json"),
        ("report", "run", "--out", "page.html"),
        ("sweep", "mine.yaml", "seq_len=16,32", "--napkin", "--out", "sweep"),
        ("napkin", "mine.yaml", "--json"),
    ]
    for command in commands:
        status, printed = call(*command)
        assert status == 0, printed
        assert CANARY.lower() not in printed.lower(), command
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"profile.json", "log.jsonl", "snapshot.pickle", "snapshot.json", "page.html", "sweep.csv"} <= {
        path.name for path in written
    }
    assert [path for path in written if CANARY.lower().encode() in path.read_bytes().lower()] == []
    size = sum(path.stat().st_size for path in written)
    tried(
        "Secrets",
        f"a canary in {len(ENVIRONMENT)} environment variables (HF_TOKEN, WANDB_API_KEY, AWS_* ...) of "
        f"{len(commands)} commands",
        f"in none of {len(written)} files written ({size:,} bytes), and not on the terminal",
        times=len(commands),
    )


@pytest.mark.parametrize("field", ["data", "model"])
@pytest.mark.parametrize("command", ["run", "simulate", "napkin", "fit", "validate"])
def test_a_url_with_a_password_is_refused_and_not_repeated(call, field, command, tmp_path, tried) -> None:
    (tmp_path / "url.yaml").write_text(
        (tmp_path / "mine.yaml").read_text() + "data: synthetic\n"
        if field == "model"
        else (tmp_path / "mine.yaml").read_text()
    )
    before = sorted(tmp_path.rglob("*"))
    for url in (
        f"https://user:{CANARY}@example.org/a.jsonl",
        f"https://example.org/a.jsonl?token={CANARY}",
        f"s3://{CANARY}@bucket/a.txt",
    ):
        status, printed = call(command, "url.yaml", f"{field}={url}")
        assert status == 2, printed
        assert "URL" in printed
        assert CANARY not in printed
        assert sorted(tmp_path.rglob("*")) == before
    tried(
        "Secrets", f"`harness {command}`: a password in the URL of `{field}`", "exit 2, not repeated", times=3
    )


def test_messages_drop_what_a_url_may_hide() -> None:
    said = str(
        InputError(f"no https://me:{CANARY}@h/p?k={CANARY} and no https:/me:{CANARY}@h (see a@b.org?).")
    )
    assert CANARY not in said
    assert "https://...@h/p?..." in said
    assert "a@b.org?" in said
    plain = "give C:/data/a@b.txt, or ask: why?"
    assert str(HarnessError(plain)) == plain


def test_code_of_strangers_is_off_and_announced_in_red(monkeypatch, capfd, call, tmp_path, tried) -> None:
    assert load_recipe("mine.yaml")[1].trust_remote_code is False
    assert "trust_remote_code" not in call("simulate", "mine.yaml")[1].split("harness:")[0]
    monkeypatch.setenv("FORCE_COLOR", "1")
    warn_of_trusted_code.cache_clear()
    status, printed = call("simulate", "mine.yaml", "trust_remote_code=true")
    assert status == 0, printed
    assert printed.count("may run, with all that you may do") == 1
    assert "\x1b[1;31mtrust_remote_code" in printed  # bold red
    tried("Recipes are data", "`trust_remote_code: true`", "announced in red, once; it is off unless written")


def test_a_checkpoint_with_code_runs_none_of_it(call, tmp_path, tried) -> None:
    """A checkpoint folder whose config names its own Python files, as a hostile one would."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    config = (MODELS / "llama.json").read_text().rstrip().rstrip("}")
    auto_map = '{"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}'
    (folder / "config.json").write_text(f'{config}, "auto_map": {auto_map}}}')
    evil = f"open({str(tmp_path / 'canary')!r}, 'w')\nclass Config: pass\nclass Model: pass\n"
    for name in ("evil.py", "modeling_llama.py", "configuration_llama.py", "tokenization_llama.py"):
        (folder / name).write_text(evil)
    statuses = []
    for weights in ("random", "pretrained"):
        status, printed = call("run", "mine.yaml", f"model={folder}", f"weights={weights}")
        assert "Traceback" not in printed
        assert not (tmp_path / "canary").exists(), printed
        statuses.append(status)
    assert statuses[0] == 0
    tried(
        "Recipes are data",
        "a checkpoint folder with Python files of its own, named in its config.json",
        "nothing of it runs",
        times=len(statuses),
    )
