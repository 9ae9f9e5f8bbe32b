"""The Hugging Face Hub where it does not answer: its libraries try for half a minute each, and tell."""

import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

HUB_ANSWERS_S = 3.0
"""Within that the Hub says something, or nobody waits for it."""


def hub_unreached(url: str = "") -> str:
    """That the Hub (or where HF_ENDPOINT points), asked for `url`, says nothing within HUB_ANSWERS_S, and
    why; empty where it answers, whatever that is, and where HF_HUB_OFFLINE forbids to ask."""
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

    asking = threading.Thread(target=ask, daemon=True)  # the look-up of a name has no time limit of its own
    asking.start()
    asking.join(HUB_ANSWERS_S)
    cannot = f"the Hub cannot be reached ({why[0]}); check the network, or HF_ENDPOINT"
    return cannot if why[0] else ""


def hub_left_alone(forbidden: bool = True) -> None:
    """From now on this process and those that it starts take what the Hub's cache has, and ask nobody."""
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = "1" if forbidden else "0"
    constants.HF_HUB_OFFLINE = forbidden
    config: Any = sys.modules.get("datasets.config")  # it has read the other one's value
    if config is not None:
        config.HF_HUB_OFFLINE = forbidden


@contextmanager
def hub_or_cache(name: str) -> Generator[str]:
    """Inside, what a library loads of `name`, an id or a folder, comes from the cache if the Hub does not
    answer. Yields why it does not; empty where it does, and for a folder."""
    before = os.environ.get("HF_HUB_OFFLINE")
    unreached = "" if os.path.isdir(os.path.expanduser(name)) else hub_unreached()
    if not unreached:
        yield ""
        return
    hub_left_alone()
    try:
        yield unreached
    finally:
        hub_left_alone(False)
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before
