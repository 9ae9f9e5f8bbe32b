"""The estimates of time: fitted to kernels that others measured, and held against kernels and runs that
others measured."""
