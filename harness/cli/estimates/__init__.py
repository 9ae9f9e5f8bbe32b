"""The commands that answer without running anything: by arithmetic, by simulation, by search, from tables."""
