"""The reports of a folder in the browser, on this machine only."""
# pyright: reportUnusedImport=false

from harness.serve.server import ADDRESS, server_of
