"""The ``kvstore`` command. One module a command; ``app`` holds what they share."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script. Ctrl-C ends it quietly while it still imports, too."""
    if os.environ.get("COLUMNS") == "0":
        # What some programs tell their children of a terminal that they do not have. Nothing would fit in.
        del os.environ["COLUMNS"]
    try:
        from kvstore.cli.app import main as run  # noqa: PLC0415 - takes a moment

        run()
    except KeyboardInterrupt:
        sys.exit(130)
