"""The ``kvstore`` command. One module a command; ``app`` holds what they share."""

from kvstore.cli.app import main

__all__ = ["main"]
