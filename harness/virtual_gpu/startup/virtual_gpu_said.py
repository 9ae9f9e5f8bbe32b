"""That a value is looked at which nobody knows: said once."""

import os
import sys
import traceback

from virtual_gpu_held import MOST_BYTES, is_assumed, is_of_floats

said = set()


def is_looked_at(to, source):
    """Whether a copy to the host is one of values that might have been known: no checkpoint, nor what is kept
    on the host for a while."""
    if not source.numel() or source.nbytes > MOST_BYTES[is_of_floats(source)]:
        return False
    if is_assumed(source) or to.is_pinned():
        return False
    frame = sys._getframe(1)
    while frame.f_back and "virtual_gpu_" in os.path.basename(frame.f_code.co_filename):
        frame = frame.f_back
    return not frame.f_code.co_filename.endswith(os.path.join("torch", "storage.py"))


def tell(read=0):
    """Once: that a value is looked at that nobody knows, and where."""
    if "read" in said:
        return
    lines = traceback.extract_stack()
    ours = [f for f in lines if "site-packages" not in f.filename and "virtual_gpu_" not in f.filename]
    where = (ours or lines)[-1]
    line = (where.line or "").strip()
    say_once(
        "read",
        f"{where.filename}:{where.lineno} reads a value that no kernel computed: it is {read:g} ({line}).",
    )


def say_once(topic, sentence):
    if topic not in said:
        said.add(topic)
        print(f"virtual GPU: {sentence} This is said once.", file=sys.stderr)
