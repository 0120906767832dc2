"""The command line, one file per command; the only home of rich and typer."""

from acceptmoe.cli.app import app, main

__all__ = ["app", "main"]
