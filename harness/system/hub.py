"""Whether the Hugging Face Hub answers, and how to use its cache alone where it does not: its libraries would
try for half a minute for each file."""

import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from harness.system.replacement import in_environment

HUB_ANSWERS_S = 3.0
"""Seconds after which the Hub counts as out of reach."""


def hub_unreached(url: str = "") -> str:
    """A clause that the Hub, or what HF_ENDPOINT names, cannot be reached, and why. Empty where it answers a
    request for `url` within HUB_ANSWERS_S, whatever the answer, and where HF_HUB_OFFLINE forbids to ask."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return ""
    why = [f"no answer in {HUB_ANSWERS_S:g} s"]

    def ask() -> None:
        try:
            get_session().head(url or constants.ENDPOINT, timeout=HUB_ANSWERS_S)
            why[0] = ""
        except Exception as error:  # every kind of failing network
            why[0] = f"{type(error).__name__}: {error}"

    # in a thread, since looking up the host's name has no time limit of its own
    request = threading.Thread(target=ask, daemon=True)
    request.start()
    request.join(HUB_ANSWERS_S)
    return f"the Hub cannot be reached ({why[0]}); check the network, or HF_ENDPOINT" if why[0] else ""


def hub_left_alone(forbidden: bool = True) -> None:
    """From now on this process, and those that it starts, use the Hub's cache alone (HF_HUB_OFFLINE). With
    `forbidden=False` they may ask the Hub again."""
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = "1" if forbidden else "0"
    constants.HF_HUB_OFFLINE = forbidden
    config: Any = sys.modules.get("datasets.config")  # it has a copy of huggingface_hub's value
    if config is not None:
        config.HF_HUB_OFFLINE = forbidden


@contextmanager
def hub_or_cache(name: str) -> Generator[str]:
    """Inside the `with` block, libraries load `name`, an id or a folder, from the cache if the Hub does not
    answer. Yields why it does not; an empty text where it does, and for a folder."""
    unreached = "" if os.path.isdir(os.path.expanduser(name)) else hub_unreached()
    if not unreached:
        yield ""
        return
    with in_environment({"HF_HUB_OFFLINE": "1"}):
        hub_left_alone()
        try:
            yield unreached
        finally:
            hub_left_alone(False)
