"""What a namespace may take of a directory that it shares: one small file each, beside the namespace's description.

``namespaces/<ns>.quota`` holds a size as people write it (docs/format.md section 7.2). It is a wish of whoever keeps
the directory, not part of the cache: nothing is lost without it, any editor may change it, and a program that knows
nothing of it ignores it. Whoever collects reads all of them and hands them on (Policy.quotas).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from kvstore.commit import put_file
from kvstore.context import Context
from kvstore.errors import SizeError
from kvstore.sizes import exact_size, parse_size

__all__ = ["MAX_QUOTA_BYTES", "Quotas", "read_quotas", "remove_quota", "size_in", "with_quota", "write_quota"]

MAX_QUOTA_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Quotas:
    """sizes: bytes on disk by namespace. problems: a sentence for each file that says nothing; it limits nothing."""

    sizes: Mapping[str, int]
    problems: tuple[str, ...] = ()


def read_quotas(context: Context) -> Quotas:
    """All quotas. Never raises: what cannot be read is a problem to be shown, and no limit."""
    sizes: dict[str, int] = {}
    problems = []
    for namespace in with_quota(context):
        path = context.layout.quota_file(namespace)
        try:
            data, _ = context.fs.read_file(path, MAX_QUOTA_BYTES)
            sizes[namespace] = size_in(data)
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"the quota {path} cannot be read ({error.strerror}), so it limits nothing")
        except SizeError:
            problems.append(f"the quota {path} does not hold a size such as 20GiB, so it limits nothing")
    return Quotas(sizes, tuple(problems))


def size_in(data: bytes) -> int:
    """The size that a quota's file holds. Raises SizeError."""
    return parse_size(data.decode(errors="replace"))


def with_quota(context: Context) -> list[str]:
    """The namespaces that have a quota, whatever it says."""
    try:
        names = os.listdir(context.layout.namespaces)
    except OSError:
        return []
    return sorted(namespace for name in names if (namespace := context.layout.quota_of(name)) is not None)


def write_quota(context: Context, namespace: str, size: int) -> None:
    """Let a namespace take that many bytes on disk; a namespace to come may be given one, too. Raises OSError."""
    put_file(context, context.layout.quota_file(namespace), [f"{exact_size(size)}\n".encode()])


def remove_quota(context: Context, namespace: str) -> bool:
    """Let a namespace take what the directory may; False when it had no quota. Raises OSError."""
    with suppress(FileNotFoundError):
        context.fs.unlink(context.layout.quota_file(namespace))
        context.fs.sync_dir(context.layout.namespaces)
        return True
    return False
