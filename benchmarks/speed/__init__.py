"""How fast our own code is, as a ratio in one run."""
