"""The commands: arguments in, exit status and tables out. No other package uses typer or rich."""
# pyright: reportUnusedImport=false

from harness.cli.entry import script
