"""How a test does what a person does to a page on a slow machine: once more."""

import itertools
import time
from collections.abc import Callable
from typing import Any


def again_until(
    page: Any, reached: Callable[[], bool], act: Callable[[int], object] = lambda attempt: None
) -> None:
    """Do ``act``, told how many times it was done, until it had its effect.

    A browser that waits for a processor takes a double click for two clicks, and hovers when it has time.
    """
    deadline = time.monotonic() + 60
    for attempt in itertools.count():
        if reached():
            return
        assert time.monotonic() < deadline, "the page did not answer within a minute"
        act(attempt)
        page.wait_for_timeout(400)


def hover(page: Any, x: float, y: float, reached: Callable[[], bool]) -> None:
    """Move the mouse there, and a pixel to and fro, until the page has seen it."""
    again_until(page, reached, lambda attempt: page.mouse.move(x + attempt % 2, y))
