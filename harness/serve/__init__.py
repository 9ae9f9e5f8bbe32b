"""`harness serve`: a local web page that answers questions and shows the reports of a folder of runs."""
# pyright: reportUnusedImport=false

from harness.serve.asking import ask_page
from harness.serve.server import ADDRESS, server_of
