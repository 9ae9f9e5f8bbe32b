"""The commands that answer without running anything: napkin, simulations, searches, tables."""
