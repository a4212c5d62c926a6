"""What `bench scale` measures: one function a part, each called in a process of its own."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench_machine import peak_memory
from kvstore import Namespace, NamespaceInfo, Span, Store, TensorSpec, pack_tokens
from kvstore.eviction import Policy
from kvstore.fsck import check
from kvstore.fsck.data import Headers
from kvstore.fsck.findings import Report
from kvstore.fsck.reading import inspect_node
from kvstore.fsck.tree import Folder, Misfits, folders
from kvstore.fsck.values import Reader
from kvstore.gc import collect
from kvstore.keys import node_key, rungs, unpack_tokens
from kvstore.layout import Kind
from kvstore.listing import listing
from kvstore.lookup import chunks
from kvstore.manifest import BlockRef
from kvstore.marking import mark
from kvstore.scan import nodes, scan
from kvstore.walk import Tally
from make_big_store import conversation_tokens

__all__ = ["MEASURE", "make_data", "peak_memory"]

_SETTLED_NS = 48 * 3600 * 10**9
"""How far the clock is put forward for gc: nothing that was made today is young then."""

_clock = time.perf_counter


def _open(job: Mapping[str, Any], **options: Any) -> Store:
    return Store.open(Path(job["store"]), create=False, **options)


def _lookup(job: Mapping[str, Any]) -> dict[str, float]:
    """The first lookup of this process, and the same again. The prompt may go on behind what is saved.

    Without the cyclic garbage collector, as timeit does it: whichever call it happens to fall into pays 0.7 ms for
    looking at the 131,072 tokens of the prompt's list.
    """
    gc.disable()
    packed = b"".join(conversation_tokens(job["number"], chunk, 2048) for chunk in range(job["depth"]))
    tokens = [*unpack_tokens(packed), *range(job["rest"])]
    started = _clock()
    store = _open(job)
    opened = _clock()
    space = store.namespace(NamespaceInfo({"model": "big"}))
    named = _clock()
    text = pack_tokens(tokens)
    packed_at = _clock()
    match = space.lookup(text)
    found = _clock()
    space.lookup(text)
    again = _clock()
    if match.count != len(tokens) - job["rest"]:
        raise AssertionError(f"{match.count} of {len(tokens)} tokens were found")
    return {
        "open": opened - started,
        "namespace": named - opened,
        "pack": packed_at - named,
        "lookup": found - packed_at,
        "again": again - found,
        **_lookup_parts(space, job),
    }


def _lookup_parts(space: Namespace, job: Mapping[str, Any]) -> dict[str, float]:
    """What a lookup's time goes to, in a conversation of which no file was looked at before."""
    text = b"".join(conversation_tokens(job["number"] + 1, chunk, 2048) for chunk in range(job["depth"]))
    found = list(chunks(space._space, text))  # noqa: SLF001 - names without a look at the files
    folder = space._space.nodes  # noqa: SLF001
    paths = [f"{folder}/{chunk.name.parent[:2]}/{chunk.name.file('kv')}" for chunk in found]
    started = _clock()
    for chunk in found:
        node_key(chunk.parent, chunk.tokens)
    hashed = _clock()
    for chunk in found:
        rungs(chunk.tokens, chunk.count)
    done = _clock()
    for path in paths:
        os.lstat(path)
    first = _clock()
    for path in paths:
        os.lstat(path)
    return {"keys": hashed - started, "rungs": done - hashed, "stat": first - done, "stat_again": _clock() - first}


def _scan(job: Mapping[str, Any]) -> dict[str, float]:
    """The manifests' names and times, then everything's."""
    context = _open(job).context
    started = _clock()
    count = len(list(nodes(context.layout, Tally())))
    listed = _clock()
    found = scan(context)
    scanned = _clock()
    return {
        "nodes": count,
        "files": len(found.nodes) + len(found.blocks),
        "scan_nodes": listed - started,
        "scan": scanned - listed,
    }


def _marking(job: Mapping[str, Any]) -> dict[str, float]:
    """What each manifest names, when their names and times are known: the longest part of a collection."""
    context = _open(job).context
    found = list(nodes(context.layout, Tally()))
    started = _clock()
    marks = mark(context, found)
    return {"nodes": len(found), "named": len(marks.named), "mark": _clock() - started}


def _ls(job: Mapping[str, Any]) -> dict[str, float]:
    context = _open(job).context
    started = _clock()
    found = listing(context)
    return {"seconds": _clock() - started, "conversations": len(found.conversations)}


def _fsck(job: Mapping[str, Any]) -> dict[str, float]:
    return _clean(check(_open(job).context, jobs=job["jobs"]))


def _data(job: Mapping[str, Any]) -> dict[str, float]:
    context = _open(job).context
    without = _clean(check(context, jobs=job["jobs"]))["seconds"]
    report = check(context, jobs=job["jobs"], read_data=True)
    return {**_clean(report), "without_data": without, "bytes": report.counts.verified_bytes}


def _clean(report: Report) -> dict[str, float]:
    if report.error or report.errors:
        raise AssertionError(report.error or report.findings[0].sentence)
    return {"seconds": report.seconds, "manifests": report.counts.manifests, "blocks": report.counts.blocks}


class _AllGood(Headers):
    """Takes every block for good without a look, to time the manifests alone."""

    def check(self, ref: BlockRef, kind: Kind) -> bytes:
        """Say nothing against it."""
        del ref, kind
        return b""


def _manifests(job: Mapping[str, Any]) -> dict[str, float]:
    """Manifests alone, without the blocks that they name: read, checksum, key from the tokens, place and name."""
    context = _open(job).context
    one = partial(_whole_manifests, Reader.of(context, context.clock()))
    listed = list(folders(context.layout, "nodes", Misfits()))
    started = _clock()
    if job["jobs"] == 1:
        good = sum(map(one, listed))
    else:
        # As fsck does it, the start of the processes included.
        with ProcessPoolExecutor(job["jobs"], multiprocessing.get_context("spawn")) as pool:
            good = sum(pool.map(one, listed))
    seconds = _clock() - started
    count = sum(len(folder.names) for folder in listed)
    if good != count:
        raise AssertionError(f"{count - good} of {count} manifests are not whole")
    return {"seconds": seconds, "manifests": count}


def _whole_manifests(reader: Reader, folder: Folder) -> int:
    headers = _AllGood(reader)
    found = [inspect_node(reader, folder.namespace, name, headers) for name in folder.names]
    return sum(one is not None and one.fault is None for one in found)


def _gc(job: Mapping[str, Any]) -> dict[str, float]:
    """Remove the conversations that were used longest ago, for real."""
    now = time.time_ns() + _SETTLED_NS
    with _open(job, clock=lambda: now) as store:
        context = store.context
        times = sorted(file.mtime_ns for file in nodes(context.layout, Tally()))
        limit = times[min(job["remove"], len(times) - 1)]
        points: dict[str, float] = {}

        def passed(point: str) -> None:
            points.setdefault(point, _clock())

        started = _clock()
        policy = Policy(older_than_ns=now - limit)
        report = collect(context, policy, pause=passed)
        done = _clock()
    if report.error:
        raise AssertionError(report.error)
    return {
        "look": points["marked"] - started,
        "plan": points["planned"] - points["marked"],
        "remove": done - points["planned"],
        "files": report.nodes + report.states + report.blocks,
    }


MEASURE: dict[str, Callable[[Mapping[str, Any]], dict[str, float]]] = {
    "lookup": _lookup,
    "scan": _scan,
    "marking": _marking,
    "ls": _ls,
    "fsck": _fsck,
    "manifests": _manifests,
    "data": _data,
    "gc": _gc,
}


def make_data(path: Path, size: int) -> None:
    """A directory with size bytes of blocks of their real size: 256 MiB each, no two alike."""
    spec = TensorSpec("k", "U8", 1, (1 << 17,))
    count = 2048
    with Store.open(path) as store:
        space = store.namespace(NamespaceInfo({"model": "data"}))
        for number in range(max(1, size // spec.span_bytes(count))):
            tokens = pack_tokens([number] * count)
            data = [os.urandom(1 << 20)] * (spec.span_bytes(count) >> 20)
            space.publish(tokens, [Span(0, count, (spec,), data)])
