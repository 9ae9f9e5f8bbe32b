"""The commands that answer without running anything: closed forms, simulations, searches, tables."""
