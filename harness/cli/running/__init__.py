"""The commands that run a recipe, or somebody's program, on this machine or a virtual GPU."""
