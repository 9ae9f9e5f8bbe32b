"""The questions for programs that ask on a person's behalf, by the Model Context Protocol.

It reads the folders it is given and what harness brings, writes nothing, and reaches no network. Imports no
torch, and the protocol's SDK only when it serves.
"""
# pyright: reportUnusedImport=false

from harness.mcp.server import serve
