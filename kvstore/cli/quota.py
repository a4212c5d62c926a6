"""``kvstore quota``: what namespaces may take of a directory that they share.

With ``--json`` one document, of the quotas as they are afterwards:

    {"directory": "/…", "quotas": [{"namespace": "<32 hex>", "label": "…", "bytes": 5368709120}], "problems": []}

problems: files that should hold a quota and do not; they limit nothing. Exit code 1 when it could not be done.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from kvstore.cli.app import DirectoryArgument, JsonOption, app, opened, output, print_json
from kvstore.cli.common import one_namespace, plain, say, warn
from kvstore.directory import complete
from kvstore.errors import KVStoreError
from kvstore.layout import Layout
from kvstore.namespace import read_label
from kvstore.quotas import Quotas, read_quotas, remove_quota, with_quota, write_quota
from kvstore.sizes import exact_size, parse_size
from kvstore.store import Store, unavailable

__all__ = ["quota"]


@app.command()
def quota(
    directory: DirectoryArgument = None,
    *,
    namespace: Annotated[
        str | None, typer.Option(metavar="ID", help="The namespace; a unique beginning of its id will do.")
    ] = None,
    size: Annotated[str | None, typer.Option(metavar="SIZE", help="What it may take on disk, such as 5GiB.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Let it take what the directory may.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what namespaces may take of the directory, or say it of one.

    `kvstore gc` and servers keep to it: a namespace over its quota loses what it used least recently, and no other one
    loses anything for it.
    """
    if clear and size is not None:
        raise typer.BadParameter("--size and --clear exclude each other")
    if (namespace is None) != (size is None and not clear):
        raise typer.BadParameter("--namespace ID goes with --size SIZE or with --clear")
    with opened(directory) as store:
        try:
            if namespace is not None:
                _change(store, namespace, None if size is None else parse_size(size))
            found = read_quotas(store.context)
        except OSError as error:
            raise unavailable(store.path, error) from error
        _show(store, found, as_json=as_json)


def _change(store: Store, namespace: str, size: int | None) -> None:
    if size is not None:
        complete(store.context.fs, store.context.layout)
        write_quota(store.context, _namespace(store, namespace), size)
        return
    # One that has nothing saved may still have a quota.
    known = [each for each in with_quota(store.context) if namespace and each.startswith(namespace.lower())]
    chosen = known[0] if len(known) == 1 else _namespace(store, namespace)
    if not remove_quota(store.context, chosen):
        raise KVStoreError(f"namespace {chosen} has no quota")


def _namespace(store: Store, prefix: str) -> str:
    """A whole id may be that of a namespace to come, as a server's log says it."""
    return prefix.lower() if Layout.is_namespace_id(prefix.lower()) else one_namespace(store, prefix)


def _show(store: Store, found: Quotas, *, as_json: bool) -> None:
    context = store.context
    rows = [(each, read_label(context.fs, context.layout, each), size) for each, size in found.sizes.items()]
    if as_json:
        quotas = [{"namespace": each, "label": label, "bytes": size} for each, label, size in rows]
        print_json({"directory": str(store.path), "quotas": quotas, "problems": list(found.problems)})
    elif rows:
        table = Table(box=None, pad_edge=False)
        table.add_column("model", overflow="ellipsis", no_wrap=True)
        table.add_column("namespace", no_wrap=True)
        table.add_column("quota", justify="right", no_wrap=True)
        for each, label, size in rows:
            table.add_row(Text(plain(label[:200])), each, exact_size(size))
        output().print(table)
    else:
        say([f"No namespace of {store.path} has a quota."])
    warn(list(found.problems))
