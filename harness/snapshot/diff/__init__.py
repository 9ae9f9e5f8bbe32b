"""Where two memory histories differ: allocations aligned one by one, segments in total."""
