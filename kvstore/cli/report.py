"""``kvstore report``: a page about a cache directory, to be looked at in any browser, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.app import DirectoryArgument, app, counted, opened
from kvstore.cli.common import say
from kvstore.errors import KVStoreError
from kvstore.report import page
from kvstore.report import report as make_report
from kvstore.sizes import format_size
from kvstore.store import unavailable

__all__ = ["report"]

_LIMIT = 20_000


@app.command()
def report(
    directory: DirectoryArgument = None,
    *,
    file: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where to write the page; - for stdout.")
    ] = "cache.html",
    limit: Annotated[
        int, typer.Option(metavar="N", min=0, help="Show so many conversations, those used last; 0 for all of them.")
    ] = _LIMIT,
) -> None:
    """Write a page for a browser: prefixes as an icicle, a timeline of their use, and a table, all in one file."""
    if not file:
        raise typer.BadParameter("the name of the file is empty")
    with opened(directory) as store:
        try:
            found = make_report(store.context, limit)
        except OSError as error:
            raise unavailable(store.path, error) from error
        text = page(found)
        if file == "-":
            typer.echo(text.encode(errors="replace"), nl=False)
            return
        try:
            Path(file).write_text(text, encoding="utf-8", errors="replace")
        except OSError as error:
            raise KVStoreError(f"cannot write {file}: {error.strerror or error}") from error
        shown = counted(len(found["conversations"]["key"]), "conversation")
        hidden = f"; {found['hidden']:,} used longer ago are left out, --limit 0 takes all" if found["hidden"] else ""
        say([f"Wrote {file}: {shown}, {format_size(len(text))}{hidden}. Open it in a browser."])
