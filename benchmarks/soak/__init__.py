"""Thousands of steps: memory flat, log complete, time flat."""
