"""A step's requests of memory as expressions of its sizes: derived from simulations, evaluated without torch."""

from harness.formula.request_log import RequestLog

__all__ = ["RequestLog"]
