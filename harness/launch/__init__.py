"""The ranks of one step as processes: PyTorch's elastic agent starts and ends them here, or torchrun started
them on several machines; how one joins the others, and what they left, put together.
"""

from harness.launch.agent import Ending, start_ranks
from harness.launch.collected import profiles_of_ranks, put_together
from harness.launch.rank import PATIENCE_S, PlaceInRanks, SignsOfLife, joined, place_in_ranks

__all__ = [
    "PATIENCE_S",
    "Ending",
    "PlaceInRanks",
    "SignsOfLife",
    "joined",
    "place_in_ranks",
    "profiles_of_ranks",
    "put_together",
    "start_ranks",
]
