"""Where things lie in a cache directory, and how file names are made and read.

    CACHE_DIR/
      CACHEDIR.TAG
      kvstore.json
      namespaces/<ns>.json | .quota
      objects/nodes/<ns>/<2 hex of parent>/<manifest>.kv | .state
      objects/blocks/<2 hex>/<digest>
      objects/tokens/<2 hex>/<key>
      stats/<host>.<boot>.<pid>.<8 hex>.json | folded.<8 hex>.json
      tmp/  locks/  quarantine/

Pure path arithmetic: nothing here opens, lists or creates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from kvstore.keys import Key

__all__ = ["FANOUT", "Kind", "Layout", "NodeName"]

Kind: TypeAlias = Literal["kv", "state"]

FANOUT = tuple(f"{byte:02x}" for byte in range(256))
"""Folder names of the one level of fan-out; measured: two levels never win below a million files."""

NAME_KEY_BYTES = 16
"""Names carry the first 128 bits of a key; the manifest holds all 256, and the tokens are compared again."""

_NODE = re.compile(r"([0-9a-f]{32})-([1-9][0-9]{0,8})-([0-9a-f]{32})-([0-9a-f]{18})\.(kv|state)")
_NODE_NAME = re.compile(_NODE.pattern.replace("(", "(?:"))  # asked for each file of a directory: groups take time
_DIGEST = re.compile(r"[0-9a-f]{32}")
_STATS = re.compile(r"(?:folded|[a-z0-9_-]{1,40}\.[0-9a-f]{1,32}\.[0-9]{1,10})\.[0-9a-f]{8}\.json")
_STAMPED = re.compile(r"[0-9a-f]+\.(.+)")


def _of_one_folder(name: re.Pattern[str]) -> re.Pattern[str]:
    """Names, a NUL between two, that all begin with the same two digits, which are its group.

    Not possessive: Python before 3.11.5 would take what a last name begins with for one (gh-106052).
    """
    return re.compile(rf"(?=(..)){name.pattern}(?:\0(?=\1){name.pattern})*")


_NODES = _of_one_folder(_NODE_NAME)
_DIGESTS = _of_one_folder(_DIGEST)


def _are_all(pattern: re.Pattern[str], names: Iterable[str], folder: str) -> bool:
    found = pattern.fullmatch("\0".join(names))
    return found is not None and found[1] == folder


@dataclass(frozen=True, slots=True)
class NodeName:
    """The parts of a manifest's file name ``<parent>-<token count>-<key>-<rungs>``, keys cut to 32 hex digits."""

    parent: str
    count: int
    key: str
    rungs: str

    def file(self, kind: Kind) -> str:
        """The file name of this node's manifest of that kind."""
        return f"{self.parent}-{self.count}-{self.key}-{self.rungs}.{kind}"

    @staticmethod
    def of(parent: Key, count: int, key: Key, rungs: str) -> NodeName:
        """The name of the node with these full keys."""
        return NodeName(parent[:NAME_KEY_BYTES].hex(), count, key[:NAME_KEY_BYTES].hex(), rungs)

    @staticmethod
    def is_file_name(name: str) -> bool:
        """Whether a file name is that of a manifest; a fraction of the cost of parse where only that is asked."""
        return _NODE_NAME.fullmatch(name) is not None

    @staticmethod
    def are_file_names(names: Iterable[str], folder: str) -> bool:
        """Whether all of some names, at least one, are those of manifests in the fan-out folder of that name: for a
        scan, which hardly ever finds others, in five sixths of the time that asking for each takes.
        """
        return _are_all(_NODES, names, folder)

    @staticmethod
    def parse(file_name: str) -> tuple[NodeName, Kind] | None:
        """The name and kind of a manifest file, or None for anything else: foreign files are not ours to judge."""
        match = _NODE.fullmatch(file_name)
        if match is None:
            return None
        kind: Kind = "kv" if match[5] == "kv" else "state"
        return NodeName(match[1], int(match[2]), match[3], match[4]), kind


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths below one cache directory."""

    root: Path

    @property
    def config(self) -> Path:
        """Format version and interval: the file that makes a folder a cache directory."""
        return self.root / "kvstore.json"

    @property
    def tag(self) -> Path:
        """The marker that makes backup programs skip the directory (bford.info/cachedir)."""
        return self.root / "CACHEDIR.TAG"

    @property
    def tmp(self) -> Path:
        """Staging, inside the directory so that a rename never crosses a file system."""
        return self.root / "tmp"

    @property
    def quarantine(self) -> Path:
        """Damaged files that were set aside."""
        return self.root / "quarantine"

    @property
    def namespaces(self) -> Path:
        """One description a namespace, for people and for ``ls``."""
        return self.root / "namespaces"

    @property
    def stats(self) -> Path:
        """Counters of processes, if there are any; made when the first is written."""
        return self.root / "stats"

    @property
    def nodes(self) -> Path:
        """All manifests, by namespace."""
        return self.root / "objects" / "nodes"

    @property
    def blocks(self) -> Path:
        """All blocks, by digest."""
        return self.root / "objects" / "blocks"

    @property
    def tokens(self) -> Path:
        """Tokenizations of whole requests."""
        return self.root / "objects" / "tokens"

    @property
    def folders(self) -> tuple[Path, ...]:
        """Every folder made at creation, parents first."""
        objects = self.root / "objects"
        return (
            objects,
            self.nodes,
            self.blocks,
            self.tokens,
            self.namespaces,
            self.tmp,
            self.root / "locks",
            self.quarantine,
        )

    def lock(self, name: Literal["publish", "gc"]) -> Path:
        """A lock file; created once, never unlinked."""
        return self.root / "locks" / f"{name}.lock"

    def namespace_file(self, namespace: str) -> Path:
        """The description of a namespace."""
        return self.namespaces / f"{namespace}.json"

    def quota_file(self, namespace: str) -> Path:
        """What a namespace may take, if somebody said so."""
        return self.namespaces / f"{namespace}.quota"

    @classmethod
    def quota_of(cls, name: str) -> str | None:
        """The namespace that a file beside the descriptions is the quota of, or None."""
        stem, _, suffix = name.partition(".")
        return stem if suffix == "quota" and cls.is_namespace_id(stem) else None

    @classmethod
    def describes_namespace(cls, name: str) -> bool:
        """Whether a file among the namespaces' is one of ours: a description or a quota."""
        stem, _, suffix = name.partition(".")
        return suffix in {"json", "quota"} and cls.is_namespace_id(stem)

    def node_folder(self, namespace: str, parent: str) -> Path:
        """The folder that all children of a parent lie in; parent is hex."""
        return self.nodes / namespace / parent[:2]

    def node(self, namespace: str, name: NodeName, kind: Kind = "kv") -> Path:
        """A manifest's path."""
        return self.node_folder(namespace, name.parent) / name.file(kind)

    def manifest(self, namespace: str, file_name: str) -> Path:
        """The path of a manifest by its file name: one Path made instead of six, for whoever makes a million."""
        return Path(f"{self.root}/objects/nodes/{namespace}/{file_name[:2]}/{file_name}")

    def block(self, digest: bytes) -> Path:
        """A block's path."""
        name = digest.hex()
        return Path(f"{self.root}/objects/blocks/{name[:2]}/{name}")

    @staticmethod
    def is_block_name(name: str) -> bool:
        """Whether a file name is that of a block."""
        return _DIGEST.fullmatch(name) is not None

    @staticmethod
    def are_block_names(names: Iterable[str], folder: str) -> bool:
        """Whether all of some names, at least one, are those of blocks in the fan-out folder of that name."""
        return _are_all(_DIGESTS, names, folder)

    @staticmethod
    def is_namespace_id(name: str) -> bool:
        """Whether a folder name is that of a namespace (the first 128 bits of its fingerprint)."""
        return _DIGEST.fullmatch(name) is not None

    @staticmethod
    def is_stats_name(name: str) -> bool:
        """Whether a file among the counters is one of ours: those of a process, or folded ones."""
        return _STATS.fullmatch(name) is not None

    @staticmethod
    def set_aside_ns(name: str) -> int:
        """When a file in quarantine was set aside, as its name says; 0 when that says nothing.

        (No time of the file tells it where a rename leaves them as they are, as on exFAT.)
        """
        return int(name.partition(".")[0], 16) if _STAMPED.fullmatch(name) else 0

    @classmethod
    def was_set_aside(cls, name: str) -> bool:
        """Whether a file in quarantine is one of ours: it keeps its name, behind the time it was set aside at."""
        stamped = _STAMPED.fullmatch(name)
        return any(
            NodeName.is_file_name(each)
            or cls.is_block_name(each)
            or cls.describes_namespace(each)
            or cls.is_stats_name(each)
            or each == "CACHEDIR.TAG"
            for each in (name, stamped[1] if stamped else name)
        )
