"""A training in the process of somebody who goes on afterwards: neither changes what the other finds."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, torch is as a new process has it in what a training depends on: it takes gradients, on no
    default device, without looking for anomalies. Afterwards the CPU's random numbers go on as if nothing had
    been inside.
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
