"""A question in the browser, and the reports of a folder, on this machine only."""
# pyright: reportUnusedImport=false

from harness.serve.asking import ask_page
from harness.serve.server import ADDRESS, server_of
