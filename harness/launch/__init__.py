"""The ranks of one step as processes: how they are started and ended, and how one joins the others.

PyTorch's elastic agent starts them on this machine, or torchrun on several.
"""
# pyright: reportUnusedImport=false

from harness.launch.agent import start_ranks
from harness.launch.rank import PlaceInRanks, SignsOfLife, joined, place_in_ranks
