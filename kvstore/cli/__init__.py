"""The ``kvstore`` command. One module a command; ``app`` holds what they share."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script. Ctrl-C ends it quietly while it still imports, too."""
    try:
        from kvstore.cli.app import main as run  # noqa: PLC0415 - takes a moment

        run()
    except KeyboardInterrupt:
        sys.exit(130)
