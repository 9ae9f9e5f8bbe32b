"""Several processes on one virtual GPU: together they have what one card has."""

import re
import sys
import textwrap

import pytest

from harness.hardware import find_hardware

pytestmark = pytest.mark.virtual_gpu
START = """
import os, subprocess, sys
import pynvml, torch
GIB = 1 << 30
total, context = {total}, {context}
pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByIndex(0)
def listed():
    return {{p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(device)}}
def used():
    return pynvml.nvmlDeviceGetMemoryInfo(device).used
def take(gib, where="cuda:0"):
    return torch.empty(gib * GIB, dtype=torch.uint8, device=where)
def other(gib):  # a process that has so much, once its line is read, and ends when it is given one
    code = f"import torch; x = torch.empty({{gib << 30}}, dtype=torch.uint8, device='cuda')"
    code += "; print(1, flush=True); input()"
    its = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert its.stdout.readline() == b"1\\n"
    return its
"""


@pytest.fixture
def shared(emulate):
    """Run code on two H100s, after START."""
    hardware = find_hardware("h100")
    start = START.format(total=hardware.memory_bytes, context=hardware.calibration.cuda_context_bytes)

    def run(code: str, **how: object):
        return emulate(code=start + textwrap.dedent(code), options=("--gpus", "2"), **how)

    return run


def test_what_one_process_has_the_other_cannot_have(shared) -> None:
    done = shared("""
        beside = other(60)
        assert torch.cuda.mem_get_info(0) == (total - 60 * GIB - 2 * context, total)
        assert torch.cuda.mem_get_info(1) == (total - context, total)
        elsewhere = take(60, "cuda:1")
        try:
            take(30)
        except torch.OutOfMemoryError as error:
            print(str(error))
        kept = take(10)
        assert listed() == {os.getpid(): 10 * GIB + context, beside.pid: 60 * GIB + context}
        assert used() == 70 * GIB + 2 * context
        beside.communicate(b"\\n")
        assert listed() == {os.getpid(): 10 * GIB + context}
        del kept
        take(30)
    """)
    assert re.search(r"Process \d+ has 60\.\d+ GiB memory in use", done.stdout)  # PyTorch's own words


def test_the_dead_have_nothing(shared) -> None:
    """One that was killed and that nobody has waited for is still in the list of processes."""
    shared("""
        beside = other(60)
        beside.kill()
        os.waitid(os.P_PID, beside.pid, os.WEXITED | os.WNOWAIT)
        assert os.path.exists(f"/proc/{beside.pid}")
        assert not listed() and not used()
        take(70)
    """)


def test_after_a_fork_and_after_exec(shared) -> None:
    shared("""
        beside = other(1)
        if os.fork() == 0:  # its own entry, with the parent as another's
            kept = take(2)
            assert listed() == {os.getpid(): 2 * GIB + context, beside.pid: GIB + context}
            os.execv(sys.executable, [sys.executable, "-c", '''
        import os, pynvml
        pynvml.nvmlInit()
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
        os._exit(len(found))
        '''.replace("        ", "")])
        assert os.wait()[1] >> 8 == 1  # what it had is gone: the other alone is left
        kept = take(3)
        if os.fork() == 0:
            assert listed() == {os.getppid(): 3 * GIB + context, beside.pid: GIB + context}
            os._exit(7)
        assert os.wait()[1] >> 8 == 7
        assert listed() == {os.getpid(): 3 * GIB + context, beside.pid: GIB + context}
        beside.communicate(b"\\n")
    """)


def test_two_that_a_shell_starts(emulate) -> None:
    """One beside the other, and the other in the place of the shell."""
    code = """
import sys, torch
x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
if sys.argv[1] == "beside":
    print("has", flush=True)
    sys.stdin.read()  # to the end of the other
else:
    said = sys.stdin.readline()
    free, total = torch.cuda.mem_get_info()
    print(said, total - free, file=sys.stderr)
"""
    script = 'mkfifo there back; "$0" -c "$1" beside >there <back & exec "$0" -c "$1" last <there >back'
    done = emulate("sh", "-c", script, sys.executable, code)
    context = find_hardware("h100").calibration.cuda_context_bytes
    assert done.stderr.split() == ["has", str(2 * ((1 << 30) + context))]
