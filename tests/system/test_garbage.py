"""The collector of cycles runs where the code says, and a process that ends at once still ends properly."""

import gc
import subprocess
import sys
import weakref

from harness.system.garbage import collected_by_hand, older_objects_kept


class Node:
    """Something that can be in a cycle and be watched."""


def cycle() -> weakref.ref[Node]:
    one, other = Node(), Node()
    one.other, other.one = other, one  # type: ignore[attr-defined]
    return weakref.ref(one)


def test_cycles_are_freed_by_hand_only() -> None:
    with collected_by_hand():
        watched = [cycle() for _ in range(3 * gc.get_threshold()[0])]
        assert all(seen() is not None for seen in watched)
        gc.collect()
        assert all(seen() is None for seen in watched)
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collected_by_hand():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_older_objects_are_kept_and_younger_ones_are_not() -> None:
    with collected_by_hand():
        older = cycle()
        with older_objects_kept():
            younger = cycle()
            gc.collect()
            assert older() is not None
            assert younger() is None
        gc.collect()
        assert older() is None


PROGRAM = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from harness.system.garbage import end_process

def late():
    time.sleep(0.2)
    print("a thread has ended")

class Taken:
    def __del__(self):
        print("taken apart")

kept = Taken()
kept.cycle = kept
atexit.register(print, "registered")
ThreadPoolExecutor(1).submit(int)
threading.Thread(target=late).start()
print("a line without end", end="", file=sys.stderr)
end_process(3)
"""


def test_the_end_of_a_process_waits_runs_flushes_and_takes_nothing_apart() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (
        3,
        "a thread has ended\nregistered\n",
        "a line without end",
    )
