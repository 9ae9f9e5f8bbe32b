"""Tells one tracker runs that are over: `python -m harness.track NAME`, with the runs as JSON on stdin.

On stdout it prints sentences for the user.
"""

import json
import os
import sys

from harness.errors import InputError
from harness.track.told import Told
from harness.track.trackers import tell

LONGEST_REASON = 400
"""How many characters of a library's error are shown."""


def in_words(error: BaseException) -> str:
    """The first line of a library's error, as a sentence."""
    while isinstance(error.__context__, ModuleNotFoundError):  # the package that is looked for first
        error = error.__context__
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"it needs the package {error.name}, which is not installed. Run: pip install {error.name}."
    if isinstance(error, InputError):
        return str(error)
    text = (str(error).strip().splitlines() or [""])[0][:LONGEST_REASON].rstrip(".")
    return f"{type(error).__name__}: {text}."


def main() -> None:
    """Tell the tracker the runs, up to the first that it does not take."""
    tracker, runs = sys.argv[1], [Told(**run) for run in json.load(sys.stdin)]
    sentences = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not for the user

    def say(words: str) -> None:
        print(f"{tracker}: {words}", file=sentences, flush=True)

    try:
        for run in runs:
            tell(tracker, run, say if run is runs[-1] else lambda words: None)
    except (Exception, SystemExit) as error:
        say(f"{in_words(error)} The run folder has every number.")


if __name__ == "__main__":
    main()
