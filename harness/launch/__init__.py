"""The ranks of one step as processes: PyTorch's elastic agent starts and ends them here, or torchrun started
them on several machines; how one joins the others.
"""
# pyright: reportUnusedImport=false

from harness.launch.agent import start_ranks
from harness.launch.rank import PlaceInRanks, SignsOfLife, joined, place_in_ranks
