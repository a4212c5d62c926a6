"""The default place, and warnings about places that do not keep files as a cache directory needs them kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvstore import locations
from kvstore.locations import Mount, Place, mount_of, place_of, warnings_for


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home folder on an ordinary disk, and temporary folders elsewhere."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("KVSTORE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    monkeypatch.setattr(locations, "_is_temporary", lambda path: False)
    monkeypatch.setattr(locations, "_mounts", lambda: iter([Mount("/", "ext4")]))
    return folder


def test_by_default_it_is_among_the_users_caches(home, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    assert place_of().path.is_relative_to(home)
    assert place_of().path.parts[-2:] == ("kvstore", "kv")
    assert warnings_for(place_of().path) == []


def test_an_environment_variable_overrides_it(home, monkeypatch):
    monkeypatch.setenv("KVSTORE_DIR", "~/elsewhere")
    assert place_of().path == home / "elsewhere"
    monkeypatch.setenv("KVSTORE_DIR", " ")
    assert place_of().path.name == "kv"
    monkeypatch.setenv("KVSTORE_DIR", "relative")
    assert place_of().path == Path.cwd() / "relative"


def test_what_is_given_comes_before_the_environment_and_that_before_the_default(home, monkeypatch):
    assert place_of("~/here") == (home / "here", "given")
    assert place_of().source == "default"
    monkeypatch.setenv("KVSTORE_DIR", "~/elsewhere")
    assert place_of("~/here") == (home / "here", "given")
    assert place_of() == (home / "elsewhere", "environment")
    monkeypatch.setenv("KVSTORE_DIR", " ")
    assert place_of().source == "default"
    reasons = {Place(Path("/"), source).why for source in ("given", "environment", "default")}
    assert len(reasons) == 3


@pytest.mark.parametrize(
    ("folder", "service"),
    [
        ("Library/Mobile Documents/com~apple~CloudDocs/kv", "iCloud Drive"),
        ("Dropbox/kv", "Dropbox"),
        ("Dropbox (Work)/kv", "Dropbox"),
        ("OneDrive/kv", "OneDrive"),
        ("OneDrive - Some Company/kv", "OneDrive"),
        ("Google Drive/My Drive/kv", "Google Drive"),
        ("GoogleDrive-me@example.org/kv", "Google Drive"),
        ("Nextcloud/kv", "Nextcloud"),
        ("Library/CloudStorage/Box-Box/kv", "a cloud service"),
        ("Library/CloudStorage/OneDrive-Personal/kv", "OneDrive"),
    ],
)
def test_synchronised_folders(home, folder, service):
    (said,) = warnings_for(home / folder)
    assert f"synchronised by {service}, " in said


@pytest.mark.parametrize("folder", ["kv", "Dropboxes/kv", "src/onedrive/kv", "Library/Caches/kvstore", "My Drives/kv"])
def test_others_are_not(home, folder):
    assert warnings_for(home / folder) == []


def test_a_link_into_a_synchronised_folder(home):
    (home / "Dropbox").mkdir()
    (home / "cache").symlink_to(home / "Dropbox", target_is_directory=True)
    (said,) = warnings_for(home / "cache" / "kv")
    assert "Dropbox" in said


def test_dropbox_says_where_its_folder_is(home):
    (home / ".dropbox").mkdir()
    info = home / ".dropbox" / "info.json"
    info.write_text(json.dumps({"personal": {"path": "/data/mine", "host": 1}, "business": 3}))
    assert "Dropbox" in warnings_for("/data/mine/kv")[0]
    assert warnings_for("/data/mines/kv") == []
    for broken in ("[]", "{", '"text"', ""):
        info.write_text(broken)
        assert warnings_for("/data/mine/kv") == []


def test_temporary_folders(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(locations, "_mounts", lambda: iter(()))
    monkeypatch.setattr("tempfile.tempdir", "/scratch/me")
    for folder in ("/tmp/kv", "/var/tmp/kv", "/private/var/folders/zz/T/kv", "/scratch/me/kv"):
        assert "temporary" in warnings_for(folder)[0]
    assert warnings_for("/opt/tmp/kv") == []


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "9p", "ceph", "fuse.rclone"])
def test_network_file_systems(monkeypatch, kind):
    monkeypatch.setattr(locations, "_mounts", lambda: iter([Mount("/", "ext4"), Mount("/net", kind)]))
    (said,) = warnings_for("/net/me/kv")
    assert f"network file system ({kind})" in said
    assert warnings_for("/network/kv") == []


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "apfs", "overlay", "fuse.gocryptfs", "exfat"])
def test_local_file_systems(monkeypatch, kind):
    monkeypatch.setattr(locations, "_mounts", lambda: iter([Mount("/", kind)]))
    assert warnings_for("/data/kv") == []


def test_a_file_system_in_memory_is_said_once(monkeypatch):
    monkeypatch.setattr(locations, "_mounts", lambda: iter([Mount("/", "ext4"), Mount("/tmp", "tmpfs")]))
    monkeypatch.setattr(locations, "_is_temporary", lambda path: True)
    (said,) = warnings_for("/tmp/kv")
    assert "in memory (tmpfs)" in said


def test_the_deepest_and_latest_mount_counts(monkeypatch):
    table = [Mount("/", "ext4"), Mount("/a", "nfs"), Mount("/a/b", "xfs"), Mount("/a", "zfs"), Mount("/ab", "cifs")]
    monkeypatch.setattr(locations, "_mounts", lambda: iter(table))
    assert mount_of(Path("/a/c")) == Mount("/a", "zfs")
    assert mount_of(Path("/a/b/c")) == Mount("/a/b", "xfs")
    assert mount_of(Path("/")) == Mount("/", "ext4")


def test_tables_of_mounts_are_understood():
    linux = "/dev/sda1 / ext4 rw 0 0\nnas:/x /mnt/my\\040share nfs4 rw,vers=4.2 0 0\nbroken\n"
    assert list(locations.parse_linux_mounts(linux)) == [Mount("/", "ext4"), Mount("/mnt/my share", "nfs4")]
    macos = (
        "/dev/disk3s1s1 on / (apfs, sealed, local, read-only, journaled)\n"
        "//me@nas/my share on /Volumes/my share (smbfs, nodev, nosuid, mounted by me)\n"
        "map auto_home on /System/Volumes/Data/home (autofs, automounted, nobrowse)\nnonsense\n"
    )
    assert [mount.kind for mount in locations.parse_macos_mounts(macos)] == ["apfs", "smbfs", "autofs"]
    assert list(locations.parse_macos_mounts(macos))[1].point == "/Volumes/my share"


@pytest.mark.skipif(not os.path.exists("/proc/self/mounts"), reason="Linux only")
def test_this_machine_has_mounts(monkeypatch):
    monkeypatch.undo()
    assert mount_of(Path("/")) is not None
    assert mount_of(Path("/proc/self")).kind == "proc"


def test_without_a_table_of_mounts_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr(locations, "_MOUNTS_LINUX", tmp_path / "none")
    monkeypatch.setattr("sys.platform", "linux")
    assert mount_of(Path("/")) is None
