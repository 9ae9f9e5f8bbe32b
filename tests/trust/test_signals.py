"""Interrupted twice, and run by somebody who may not read or write everything."""

import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from harness.run_folder.checkpoint_files import checkpoints, verify
from harness.step_profile.step_profile import StepProfile
from tests.support.forked import Forks
from tests.support.trust_report import Tried
from tests.trust.test_kill import KILLS, STATUS, halves, losses

GAPS_S = (0.0, 0.001, 0.005, 0.02, 0.1, 0.3)
"""Between the two signals: both at once, one while the other is being answered, one after."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_two_interrupts(number: signal.Signals, forks: Forks, folder: Path, tried: Tried) -> None:
    """The second comes while the first is answered: the log and the profile are whole all the same."""
    arguments = ["run", "mine.yaml", "checkpoint_every=4", "--out", "run"]
    whole = forks.run(arguments, Path(shutil.copytree(folder, folder.parent / "whole")))
    assert whole.status == 0, whole.printed
    moments, left = random.Random(number.name), Counter[str]()
    gaps = GAPS_S * max(1, KILLS // 6)
    for n, gap_s in enumerate(gaps):
        copy = Path(shutil.copytree(folder, folder.parent / f"twice-{n}"))
        moment = moments.uniform(0.1, 0.9) * whole.seconds
        ended = forks.run(arguments, copy, signal=number, after_s=moment, again_after_s=gap_s)
        assert ended.status in (0, STATUS[number], -number), ended
        assert "Traceback" not in ended.printed, ended.printed
        run = copy / "run"
        assert not halves(run)
        logged = len(losses(run))
        for checkpoint in checkpoints(run / "checkpoints"):
            verify(checkpoint)
        if (run / "profile.json").exists():
            assert len(StepProfile.read(run / "profile.json").step.loss or ()) - logged in (0, 1)
            left["a whole profile"] += 1
        else:
            left["a log without a profile" if logged else "nothing"] += 1
        shutil.rmtree(copy)
    found = ", ".join(f"{count} × {what}" for what, count in left.most_common())
    fault = f"`harness run`, {number.name} twice, 0 to 300 ms apart"
    tried(
        "Killed at a random moment", fault, f"left {found}; no traceback, nothing by halves", times=len(gaps)
    )


MOMENTS = {
    "before the answer to signals is imported": "sys.meta_path.insert(0, Finder('harness.system'))",
    "while the commands are imported": "sys.meta_path.insert(0, Finder('harness.cli.app'))",
    "while the first is answered": "app.complain = again",
    "while the process ends": "atexit.register(again)",
}
SENT = """
import atexit, signal, sys, time
def again(*_):
    time.sleep(0.1)  # later than what passes for one signal
    signal.raise_signal({number})
class Finder:
    def __init__(self, name):
        self.name = name
    def find_spec(self, name, *_):
        if name == self.name:
            again()
if {imported}:
    from harness.cli import app
    app._command = lambda: signal.raise_signal({number})
{moment}
from harness.cli import script
script()
"""


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupt_outside_the_command(number: signal.Signals, moment: str) -> None:
    """Where there is nothing to put in order, the process ends without a word."""
    code = SENT.format(number=int(number), moment=MOMENTS[moment], imported="import" not in moment)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    said = "harness: interrupted\n" if "ends" in moment else ""
    status = done.returncode if done.returncode >= 0 else 128 - done.returncode  # as a shell counts
    assert (status, done.stdout, done.stderr) == (STATUS[number], "", said)


def test_an_interrupt_while_a_module_is_imported_waits_for_it(tmp_path: Path) -> None:
    """C++ that imports a module in Python, as torch.distributed's does, would abort the process."""
    (tmp_path / "imported.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.1)\nprint('whole')\n"
    )
    code = (
        f"import sys, time; sys.path.append({str(tmp_path)!r})\n"
        "from harness.cli import app, script\n"
        "def command():\n    import imported\n    time.sleep(60)\n"
        "app._command = command\nscript()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (130, "whole\n", "harness: interrupted\n")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere root cannot give up its rights")
def test_somebody_with_few_rights(forks: Forks, folder: Path, tried: Tried) -> None:
    made = forks.run(["run", "mine.yaml", "steps=1", "--out", "run"], folder)
    assert made.status == 0, made.printed
    (folder / "secret.yaml").write_text("model: a\n")
    (folder / "secret.json").write_text("{}")
    for name in ("secret", "closed", "own"):
        (folder / name).mkdir()
    for name in ("secret.yaml", "secret.json", "secret", "run/snapshot.pickle"):
        (folder / name).chmod(0)
    (folder / "closed").chmod(0o555)
    refused = {
        "run mine.yaml --out closed": "cannot write in closed",
        "run mine.yaml --out closed/run": "cannot write in",
        "run mine.yaml --out run": "already holds",
        "run mine.yaml --out secret/run": "secret",
        "run secret.yaml --out own/a": "cannot read the recipe secret.yaml: Permission denied",
        "napkin secret.yaml": "Permission denied",
        f"napkin mine.yaml model={folder}/secret.json": "Permission denied",
        "validate secret.json": "Permission denied",
        "report secret": "secret",
        "report run --out own/page.html": "snapshot.pickle: Permission denied",
        "report run/profile.json --out closed/page.html": "cannot write closed/page.html: Permission denied",
        "snapshot to-json run/snapshot.pickle": "is not readable",
        "sweep mine.yaml seq_len=16,32 --napkin --out closed/sweep": "Permission denied",
        "sweep mine.yaml seq_len=16,32 --napkin --out secret": "secret",
        "serve secret --port 0": "secret",
        "run mine.yaml --resume secret": "secret",
    }
    allowed = [
        "run mine.yaml steps=1 --out own/run",
        "report own/run",
        "report run/profile.json --out own/page.html",
        "sweep mine.yaml seq_len=16,32 --napkin --out own/sweep",
    ]
    try:
        for command, said in refused.items():
            ended = forks.run(command.split(), folder, ordinary=True)
            assert "Traceback" not in ended.printed, (command, ended.printed)
            assert ended.status == 2, (command, ended)
            assert said in ended.printed, (command, ended.printed)
        for command in allowed:
            ended = forks.run(command.split(), folder, ordinary=True)
            assert ended.status == 0, (command, ended)
    finally:
        for name in ("secret", "closed"):  # pytest removes them
            (folder / name).chmod(0o755)
    times = len(refused) + len(allowed)
    fault = "files and folders that the user may not read or write, in every command"
    tried("Rights", fault, "exit 2, the file and the reason named; what is allowed works", times=times)
