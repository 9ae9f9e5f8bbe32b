"""The ranks of one step as processes, which PyTorch's elastic agent starts on this machine or torchrun on
several, and how a rank joins the others.
"""
# pyright: reportUnusedImport=false

from harness.launch.agent import start_ranks
from harness.launch.rank import PlaceInRanks, SignsOfLife, joined, place_in_ranks
