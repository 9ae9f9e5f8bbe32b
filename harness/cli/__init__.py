"""The commands: arguments in, exit status and tables out. The only home of typer and rich."""
# pyright: reportUnusedImport=false

from harness.cli.entry import script
