"""A server of the Model Context Protocol, for programs that ask harness's questions on a person's behalf.

It reads the folders it is given and the recipes and models of harness, writes nothing, and reaches no
network. Imports no torch, and the protocol's SDK only when it serves.
"""
# pyright: reportUnusedImport=false

from harness.mcp.server import serve
