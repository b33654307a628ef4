"""The command line `trunkline`: its own commands, and those that other packages add."""

from trunkline.cli.app import main

__all__ = ["main"]
