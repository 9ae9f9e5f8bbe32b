"""Warnings about values, each printed once: above all that the program reads a value that nobody computed."""

import os
import sys
import traceback

from virtual_gpu_held import MOST_BYTES, is_assumed, is_of_floats

said = set()
"""Topics of the warnings that were printed."""


def is_looked_at(to, source):
    """Whether the program seems to read the values of `source`, which it copies to `to` on the host.

    Not those of a checkpoint (torch/storage.py copies it), of an offload (`to` is pinned), nor of a tensor so
    large that its values are never held.
    """
    if not source.numel() or source.nbytes > MOST_BYTES[is_of_floats(source)]:
        return False
    if is_assumed(source) or to.is_pinned():
        return False
    frame = sys._getframe(1)
    while frame.f_back and "virtual_gpu_" in os.path.basename(frame.f_code.co_filename):
        frame = frame.f_back
    return not frame.f_code.co_filename.endswith(os.path.join("torch", "storage.py"))


def tell(read=0):
    """Warn, once, that the program reads a value that nobody knows: where, and that it finds `read` there."""
    if "read" in said:
        return
    frames = traceback.extract_stack()
    own = [f for f in frames if "site-packages" not in f.filename and "virtual_gpu_" not in f.filename]
    where = (own or frames)[-1]
    line = (where.line or "").strip()
    say_once(
        "read",
        f"{where.filename}:{where.lineno} reads a value that no kernel computed: it is {read:g} ({line}).",
    )


def say_once(topic, sentence):
    """Print `sentence`, unless one was printed about this topic before."""
    if topic not in said:
        said.add(topic)
        print(f"virtual GPU: {sentence} This is said once.", file=sys.stderr)
