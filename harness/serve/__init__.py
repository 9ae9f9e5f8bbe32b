"""The reports of a folder in the browser, on this machine only."""

from harness.serve.server import ADDRESS, server_of

__all__ = ["ADDRESS", "server_of"]
