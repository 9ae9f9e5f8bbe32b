"""`harness watch` as a user runs it, on the CPU: programs, their ends, and what is shown of their folders."""

import sys
from pathlib import Path

import pytest

from harness.answers import diff_profiles
from harness.api import load_profile
from harness.errors import InputError
from harness.report.first_words import first_words
from harness.report.run import read_run
from harness.run_folder.secrets import without_secrets
from harness.serve.index import Index
from harness.step_profile.step_profile import StepProfile
from harness.watching.launch import parse_steps
from tests.support.commands import Ended, exit_status, run_harness

PROGRAM = str(Path(__file__).parent / "programs" / "plain.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


def watch(folder: Path, *command: str, status: int = 0) -> Ended:
    return run_harness("watch", "--out", str(folder / "run"), "--", *command, cwd=folder, status=status)


def test_a_program_with_workers(tmp_path: Path, capsys) -> None:
    """Its forked workers leave nothing, and what it prints is its own."""
    command = (sys.executable, PROGRAM, "workers", "--hub-token", "hf_secret")
    done = watch(tmp_path, *command)
    assert done.stdout == "the program's own word: workers\n"
    assert "one step by phase" in done.stderr
    run = tmp_path / "run"
    assert {path.name for path in run.iterdir()} == {
        *("command.json", "log.jsonl", "profile.json", "snapshot.pickle")
    }
    profile = StepProfile.read(run / "profile.json")
    assert profile.complete
    assert profile.recipe is None
    assert profile.command == [sys.executable, PROGRAM, "workers", "--hub-token", "..."]
    assert len((run / "log.jsonl").read_text().splitlines()) == 6
    # shown: as a page, as a table, and in the list of runs
    for options in ([], ["--markdown"]):
        assert exit_status("report", run, *options) == 0
    assert "| between |" in capsys.readouterr().out
    page = (run / "report.html").read_text()
    assert f"{PROGRAM} workers" in page
    assert "hf_secret" not in page
    (entry,) = Index(tmp_path).entries()
    assert (entry.kind, entry.problem) == ("run", None)
    assert entry.model.startswith(Path(sys.executable).name)
    (run / "profile.json").unlink()
    (run / "snapshot.pickle").unlink()
    (entry,) = Index(tmp_path).entries()  # as while it runs
    assert (entry.kind, entry.problem) == ("stopped", None)
    assert "step 6, loss" in entry.answer


def test_two_ranks(tmp_path: Path) -> None:
    """The second has twice the batch."""
    done = watch(tmp_path, *TORCHRUN, PROGRAM)
    profiles = [StepProfile.read(tmp_path / "run" / "ranks" / str(n) / "profile.json") for n in (0, 1)]
    peaks = [profile.memory.peak_allocated_bytes or 0 for profile in profiles]
    assert all(profile.complete for profile in profiles)
    assert peaks[0] < peaks[1]
    whole = StepProfile.read(tmp_path / "run" / "profile.json")
    assert whole.ranks is not None
    assert whole.complete
    assert (whole.ranks.world_size, whole.ranks.peak_rank) == (2, 1)
    assert whole.memory == profiles[1].memory
    assert [rank.peak_allocated_bytes for rank in whole.ranks.ranks] == peaks
    assert all(
        set(rank.phases_s) >= {"data", "forward", "backward", "optimizer_step"} for rank in whole.ranks.ranks
    )
    assert "2 ranks: rank 1 peaks highest" in done.stderr
    history = (tmp_path / "run" / "snapshot.pickle").read_bytes()
    assert history == (tmp_path / "run" / "ranks" / "1" / "snapshot.pickle").read_bytes()
    sentences = first_words(read_run(tmp_path / "run"))
    assert any("rank 1 peaks highest" in sentence for sentence in sentences)
    (tmp_path / "run" / "profile.json").unlink()  # as harness.watch in a script under torchrun leaves it
    assert read_run(tmp_path / "run").profile == whole
    assert load_profile(tmp_path / "run") == whole
    other = diff_profiles(whole, profiles[0])
    assert ("rank", "1", peaks[1], None) in [(d.place, d.name, d.first, d.second) for d in other.bytes]


def test_memory_that_runs_out(tmp_path: Path) -> None:
    """The traceback, the explanation, and the program's own exit status."""
    done = watch(tmp_path, sys.executable, PROGRAM, "out of memory", status=1)
    assert "harness: out of memory in forward, explained at the end" in done.stderr
    assert done.stderr.count("out of memory in forward, asking for 4,294,967,296.00 GiB") == 1
    assert "RuntimeError" in done.stderr
    profile = StepProfile.read(tmp_path / "run" / "profile.json")
    assert profile.oom is not None
    assert not profile.complete
    assert (tmp_path / "run" / "snapshot.pickle").exists()


def test_a_program_that_is_killed(tmp_path: Path) -> None:
    """In the middle of a recorded step: the steps before it are there."""
    done = watch(tmp_path, sys.executable, PROGRAM, "killed", status=128 + 9)
    assert "ended by signal 9 in step 4; the profile so far is marked incomplete" in done.stderr
    profile = StepProfile.read(tmp_path / "run" / "profile.json")
    assert not profile.complete
    assert profile.phases["backward"].peak_allocated_bytes
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 3


def test_nothing_is_found(tmp_path: Path) -> None:
    done = watch(tmp_path, sys.executable, PROGRAM, "never backward")
    assert "6 x forward, 0 x backward, 0 x optimizer step" in done.stderr
    assert "looked for steps in every Python process" in done.stderr
    assert not (tmp_path / "run").exists()
    done = watch(tmp_path, "false", status=1)
    assert "nothing was recorded, and the command ended with status 1." in done.stderr


def test_what_is_refused(tmp_path: Path) -> None:
    assert "there is no command /no/such" in watch(tmp_path, "/no/such", status=2).stderr
    (tmp_path / "train.sh").write_text("echo no interpreter is named")
    (tmp_path / "train.sh").chmod(0o755)
    assert (
        "train.sh cannot be run: Exec format error"
        in watch(tmp_path, str(tmp_path / "train.sh"), status=2).stderr
    )
    (tmp_path / "run").mkdir()  # which is not there yet
    (tmp_path / "run" / "profile.json").touch()
    assert "already holds a profile.json" in watch(tmp_path, "true", status=2).stderr
    for text in ("", "0", "5-3", "3-", "a-b", "1-2-3", "9" * 10):
        with pytest.raises(InputError, match=r"--steps .*: give the first and the last step"):
            parse_steps(text)
    assert (parse_steps("3-5"), parse_steps("4")) == ((3, 5), (4, 4))


HIDDEN = {
    "python t.py --api-key=abc --hub_token hf_x --epochs 3 --password p q": (
        "python t.py --api-key=... --hub_token ... --epochs 3 --password ... q"
    ),
    "env HF_TOKEN=abc WANDB_API_KEY=x A=1 python t.py": "env HF_TOKEN=... WANDB_API_KEY=... A=1 python t.py",
    "t.py --auth=Bearer_abc -k sk-2 -u me:pw hub.token=abc": "t.py --auth=... -k ... -u ... hub.token=...",
    "t.py --url https://user:pw@host/x --from https://ghp@host": (
        "t.py --url https://...@host/x --from https://...@host"
    ),
    "t.py hf_abcdefgh1234 x=sk-proj-abcdefgh https://h/?api_key=abc&n=3": (
        "t.py ... x=... https://h/?api_key=...&n=3"
    ),
    # what is none
    "t.py --tokenizer gpt2 --max-tokens 512 --keyboard x --lr=1e-3 monkey=1 git@host:x.git a@b": None,
    "torchrun --nproc-per-node 2 -m train model=llama hydra.key_count= out:/x http://host:80/x": None,
}


@pytest.mark.parametrize("command", HIDDEN)
def test_secrets_of_a_command_are_not_written_down(command: str) -> None:
    shown = HIDDEN[command] or command
    assert without_secrets(command.split(" ")) == shown.split(" ")


def test_secrets_within_a_word_are_not_written_down() -> None:
    words = [
        "HF_TOKEN=abc exec python t.py --hub-token abc --n 3",
        '{"api_key": "abc", "n": 3}',
        "Authorization: Bearer abc",
        "--auth=Bearer abc",
        "a plain sentence with a token in it",
    ]
    assert without_secrets(words) == [
        "HF_TOKEN=... exec python t.py --hub-token ... --n 3",
        '{"api_key": "...", "n": 3}',
        "Authorization: ... ...",
        "--auth=...",
        "a plain sentence with a token in it",
    ]


def test_no_file_of_a_run_has_a_secret(tmp_path: Path) -> None:
    """Nor the page and what is printed: the words go everywhere from one place."""
    secret = "abc123secret"
    command = (
        "env",
        f"HF_TOKEN={secret}",
        sys.executable,
        PROGRAM,
        "workers",
        f"--url=https://me:{secret}@h",
    )
    done = watch(tmp_path, *command)
    assert secret not in done.stderr
    run_harness("report", str(tmp_path / "run"), cwd=tmp_path)
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"command.json", "profile.json", "report.html"} <= {path.name for path in written}
    for path in written:
        assert secret.encode() not in path.read_bytes(), path
