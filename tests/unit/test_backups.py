"""What is asked of macOS, as fake system calls see it: backups pass a directory over, and a boot has a name."""

from __future__ import annotations

import ctypes
import errno
import plistlib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from core_support import INFO, open_store, prompt, restore, spans

from kvstore import Durability, FileSystem
from kvstore import context as context_module
from kvstore.context import Owner, this_process

NAME = b"com.apple.metadata:com_apple_backup_excludeItem"


@dataclass(frozen=True)
class Recording(FileSystem):
    """Says which folders backups were asked to pass over, and what was in them by then."""

    durability: Durability = Durability.NONE
    asked: list[tuple[Path, list[str]]] = field(default_factory=list)
    error: OSError | None = None

    def exclude_from_backup(self, path: Path) -> None:
        self.asked.append((path, [each.name for each in path.iterdir()]))
        if self.error is not None:
            raise self.error


def test_it_is_asked_for_once_before_anything_is_in_the_directory(tmp_path):
    fs = Recording()
    for _ in range(2):
        open_store(tmp_path / "cache", fs=fs).close()
    assert fs.asked == [(tmp_path / "cache", [])]


def test_a_file_system_without_attributes_is_no_reason_to_fail(tmp_path):
    fs = Recording(error=OSError(errno.ENOTSUP, "not supported"))
    with open_store(tmp_path / "cache", fs=fs) as store:
        store.namespace(INFO).publish(prompt(9), spans(prompt(9), 0, 9))
        assert restore(store.namespace(INFO), prompt(9)).tokens == 9
    assert len(fs.asked) == 1


class Library:
    """The C library of a Mac, for its one call."""

    def __init__(self, result: int = 0) -> None:
        self.calls: list[tuple] = []

        def setxattr(*arguments: object) -> int:
            self.calls.append(arguments)
            return result

        self.setxattr = setxattr


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")

    def install(found: object) -> object:
        monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: found)
        monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EPERM)
        return found

    return install


def test_on_macos_the_attribute_is_set(library):
    mac = library(Library())
    FileSystem().exclude_from_backup(Path("/folder of mine/é"))
    ((path, name, value, size, position, options),) = mac.calls
    assert (path, name, size, position, options) == ("/folder of mine/é".encode(), NAME, len(value), 0, 0)
    assert value.startswith(b"bplist00")
    assert plistlib.loads(value) == "com.apple.backupd"


def test_what_macos_answers_is_an_error(library):
    library(Library(-1))
    with pytest.raises(PermissionError, match="/x"):
        FileSystem().exclude_from_backup(Path("/x"))


def test_a_library_without_the_call_is_an_error_too(library):
    library(object())
    with pytest.raises(OSError, match="/x") as raised:
        FileSystem().exclude_from_backup(Path("/x"))
    assert raised.value.errno == errno.ENOTSUP


def test_elsewhere_nothing_is_called(library, monkeypatch):
    other = library(Library())
    monkeypatch.setattr("sys.platform", "linux")
    FileSystem().exclude_from_backup(Path("/x"))
    assert other.calls == []


UUID = b"5E1F0C2A-0B1D-4C3E-9F00-AABBCCDDEEFF"


class Sysctl:
    """The C library of a Mac, for its other call."""

    def __init__(self, value: bytes = UUID, result: int = 0) -> None:
        def sysctlbyname(name, into, size, new, length):
            assert (name, new, length) == (b"kern.bootsessionuuid", None, 0)
            assert size._obj.value >= len(value) + 1
            into.value = value
            return result

        self.sysctlbyname = sysctlbyname


@pytest.fixture
def fresh_boot():
    context_module._boot.cache_clear()
    yield
    context_module._boot.cache_clear()


@pytest.mark.parametrize(
    ("found", "boot"),
    [
        (Sysctl(), "5e1f0c2a0b1d4c3e9f00aabbccddeeff"),
        (Sysctl(result=-1), "0"),
        (Sysctl(b"not a uuid"), "0"),
        (Sysctl(b""), "0"),
        (object(), "0"),
    ],
    ids=["a name", "refused", "no name", "empty", "no such call"],
)
def test_a_boot_of_macos_has_a_name(library, fresh_boot, found, boot):
    library(found)
    me = this_process()
    assert me.boot == boot
    assert Owner.parse(f"{me.host}.{me.boot}.{me.pid}.01234567") == me
    # A process of a boot before this one is gone, whoever has its number now.
    assert Owner(me.host, "1" * 32, me.pid).surely_gone()
    assert not me.surely_gone()
