"""Saves what a longer run needs to go on after an interruption, and restores it."""

from harness.checkpoint.checkpoint import NotFiniteWeights, Saved, read, restore, save
