"""``kvstore tree``: what ``kvstore ls --tree`` shows, by the name that people look for. Its JSON is that of ls."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.cli.app import DirectoryArgument, JsonOption, app
from kvstore.cli.common import PrefixOption
from kvstore.cli.ls import ls

__all__ = ["tree"]


@app.command()
def tree(
    directory: DirectoryArgument = None,
    *,
    as_json: JsonOption = False,
    namespace: PrefixOption = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Show so many conversations, those used last; 0 for all.")
    ] = None,
) -> None:
    """Show conversations as a tree: what they share stands once, with sizes and last use (the same as ls --tree)."""
    ls(directory, as_json=as_json, namespace=namespace, limit=limit, tree=True)
