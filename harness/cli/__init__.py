"""The commands: arguments in, exit status and tables out. The only home of typer and rich."""

from harness.cli.entry import script
