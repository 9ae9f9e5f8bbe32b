"""Keeps a training and the program that called it apart: neither changes torch's settings for the other."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside the `with` block, torch has a new process' settings where a training depends on them: it records
    gradients, has the CPU as its default device and detects no anomalies. Afterwards the CPU's random numbers
    go on as if nothing had been drawn in the block.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield
