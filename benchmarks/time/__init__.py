"""The estimates of time: fitted to kernels that others measured, and held against kernels and runs that
others measured."""

CARDS = ("h100", "h200")
"""The cards that were measured with the programme of benchmarks/gpu_programme, by their names in the
hardware table."""
