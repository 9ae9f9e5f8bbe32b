"""What a longer run saves to go on from, and how it goes on."""

from harness.checkpoint.checkpoint import NotFiniteWeights, Saved, read, restore, save
