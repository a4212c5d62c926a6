"""What tools/verify_filesystem.py asks about the place, names, room and speed, and a small store to see it all work."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvstore import KVStoreError, NamespaceInfo, Span, Store, TensorBuffer, TensorSpec
from kvstore.locations import mount_of, warnings_for
from verify_checks import MIB, Check, Verdict, fail, ok, put, warn

__all__ = ["LIMITS"]


def location(folder: Path) -> Verdict:
    """Warnings about the place as such."""
    directory = folder.parent.parent  # the one that was asked about
    said = warnings_for(directory)
    mount = mount_of(directory)
    kind = f"{mount.kind} at {mount.point}" if mount else "unknown file system"
    return warn(f"{kind}; {'; '.join(said)}") if said else ok(kind)


def name_case(folder: Path) -> Verdict:
    """Names of kvstore are lower-case hex."""
    put(folder / "abcdef.kv")
    if os.listdir(folder) != ["abcdef.kv"]:
        return fail(
            f"the name abcdef.kv becomes {os.listdir(folder)[0]}; kvstore would take its files for foreign ones"
        )
    put(folder / "ABCDEF.kv")
    folds = len(os.listdir(folder)) == 1
    return ok("folds case: harmless, all names of kvstore are lower-case" if folds else "kept, and told apart")


def name_unicode(folder: Path) -> Verdict:
    """Names of kvstore are ASCII; the path of the directory may be anything."""
    name = "caf\u00e9"
    try:
        put(folder / name)
    except (OSError, UnicodeError):
        return warn("names beyond ASCII cannot be made: name the cache directory in ASCII")
    if os.listdir(folder) != [name]:
        return ok("normalised: harmless, all names of kvstore are ASCII")
    return ok("kept as written")


def name_length(folder: Path) -> Verdict:
    """Manifest names have about 100 characters."""
    name = "f" * 32 + "-65536-" + "0" * 32 + "-" + "a" * 18 + ".state"
    with suppress(OSError):
        put(folder / name.ljust(100, "z"))
        if os.listdir(folder) == [name.ljust(100, "z")]:
            return ok("100 characters")
    return fail("a file name cannot have 100 characters; manifests could not be written")


def path_length(folder: Path) -> Verdict:
    """objects/nodes/<32>/<2>/<100> below the directory."""
    deep = folder / "objects" / "nodes" / ("f" * 32) / "ff"
    try:
        deep.mkdir(parents=True)
        put(deep / ("f" * 100))
    except OSError as error:
        return fail(f"{len(str(deep)) + 101} characters are too long ({error.strerror}); use a shorter path")
    return ok(f"{len(str(deep)) + 101} characters")


def hard_links(folder: Path) -> Verdict:
    """Only for copies with cp -al or rsync --link-dest."""
    try:
        os.link(put(folder / "one"), folder / "two")
    except OSError:
        return ok("none: harmless, kvstore makes none; copies with cp -al will not work")
    return ok("supported; kvstore makes none")


def sparse(folder: Path) -> Verdict:
    """Whether a hole counts: only tells what a copy may do to the budget."""
    path = put(folder / "file")
    os.truncate(path, 16 * MIB)
    counted = os.stat(path).st_blocks * 512
    return ok("holes take no room" if counted < MIB else "holes take room: harmless, kvstore makes none")


def room(folder: Path) -> Verdict:
    """Bytes and inodes."""
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    said = f"{free / 2**30:.1f} GiB"
    if status.f_files:
        said += f" and {status.f_favail:,} files"
    if free < 1 << 30 or (status.f_files and status.f_favail < 10_000):
        return warn(f"only {said} free: a 20,000-token prompt of a small model takes 1 GiB, and 20 files")
    return ok(f"{said} free")


def speed(folder: Path) -> Verdict:
    """How long the calls of a lookup and of a publish take here: medians."""
    path = put(folder / "file")
    staged = folder / "staged"
    stat_s = _median(200, lambda: os.stat(path))
    create_s = _median(100, lambda: put(staged, b"x" * 9000))

    def swap() -> None:
        os.rename(staged, path)
        os.rename(path, staged)

    there_and_back = _median(100, swap)
    put(path)
    fd = os.open(path, os.O_WRONLY)
    try:

        def written() -> None:
            os.pwrite(fd, os.urandom(4096), 0)
            with suppress(OSError):
                os.fsync(fd)

        sync_s = _median(10, written)
    finally:
        os.close(fd)
    said = (
        f"stat {stat_s * 1e6:.0f} us, write 9 KB {create_s * 1e6:.0f} us, "
        f"rename {there_and_back / 2 * 1e6:.0f} us, write and fsync 4 KB {sync_s * 1e3:.1f} ms"
    )
    if stat_s > 0.002:
        return warn(f"{said}: a lookup needs a stat for every 2,048 tokens")
    if sync_s > 0.5:
        return warn(f"{said}: a publish syncs some times a node; consider durability none")
    return ok(said)


def _median(times: int, call: Callable[[], object]) -> float:
    found = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def a_store(folder: Path) -> Verdict:
    """All of it at once: publish a prompt, open the directory again, restore it."""
    spec, tokens, kv = TensorSpec("k", "U8", 1, (64,)), list(range(3000)), os.urandom(3000 * 64)
    info = NamespaceInfo({"verify": 1})
    spans = [Span(0, 2048, (spec,), [kv[: 2048 * 64]]), Span(2048, 952, (spec,), [kv[2048 * 64 :]])]
    memory = bytearray(len(kv))
    try:
        with Store.open(folder / "kv") as store:
            store.namespace(info).publish(tokens, spans)
        with Store.open(folder / "kv", create=False) as store:
            space = store.namespace(info)
            restored = space.read(space.lookup(tokens), lambda _, count: {"k": TensorBuffer(memoryview(memory), count)})
    except KVStoreError as error:
        return fail(str(error))
    if restored.tokens != len(tokens) or bytes(memory) != kv:
        return fail(f"of a published prompt of {len(tokens)} tokens {restored.tokens} were restored")
    return ok(f"a prompt of {len(tokens)} tokens was published and restored")


LIMITS: dict[str, Check] = {
    "location": location,
    "case of names": name_case,
    "unicode in names": name_unicode,
    "length of names": name_length,
    "length of paths": path_length,
    "hard links": hard_links,
    "sparse files": sparse,
    "room": room,
    "speed": speed,
    "a small store": a_store,
}
