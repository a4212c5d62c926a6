"""Reading all data: in pieces, by several threads and processes, and going on after an interruption."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from core_support import FAST
from fsck_damage import future, tokens_entry
from fsck_support import GROWN, LONG, OTHER, block, errors, flip, node, run

from kvstore import FileSystem
from kvstore.fsck import ExitCode
from kvstore.layout import Layout

# Reading data: in pieces, by several threads and processes, and going on after an interruption.


def stopping_after(number: int, opened: list[str]) -> FileSystem:
    """Is interrupted like by Ctrl-C when that many blocks were opened."""

    @dataclass(frozen=True)
    class Stopping(FileSystem):
        def open_read(self, path):
            if "blocks" in str(path):
                opened.append(Path(path).name)
                if len(opened) > number:
                    raise KeyboardInterrupt
            return super().open_read(path)

    return Stopping(FAST.durability)


def test_an_interrupted_check_goes_on_where_it_was(root, tmp_path):
    record = tmp_path / "record"
    first: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(root, fs=stopping_after(4, first), read_data=True, resume=record)
    # Torn by a kill in the middle of a write.
    record.write_bytes(record.read_bytes() + b"half a record")
    second: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(root, fs=stopping_after(4 + 3, second), read_data=True, resume=record)
    report = run(root, read_data=True, resume=record)
    assert report.exit_code == ExitCode.CLEAN
    assert (report.counts.resumed, report.counts.verified) == (7, 2)
    assert report.counts.resumed_bytes + report.counts.verified_bytes == report.counts.block_bytes
    assert not record.exists(), "the next check reads everything again"
    assert run(root, read_data=True, resume=record).counts.resumed == 0


def test_what_changed_since_it_was_read_is_read_again(root, tmp_path):
    record = tmp_path / "record"
    opened: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(root, fs=stopping_after(4, opened), read_data=True, resume=record)
    layout = Layout(root)
    flip(layout.block(bytes.fromhex(opened[0])))
    shutil.copy(layout.block(bytes.fromhex(opened[1])), tmp_path / "copy")
    (tmp_path / "copy").rename(layout.block(bytes.fromhex(opened[1])))
    report = run(root, read_data=True, resume=record)
    assert report.counts.resumed == 2
    assert opened[0] in {Path(path).name for path, code in errors(report.findings).items() if code == "block-damaged"}


def test_damage_is_found_again_after_an_interruption(root, tmp_path):
    """Only what was read and right is recorded."""
    record = tmp_path / "record"
    opened: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(root, fs=stopping_after(0, opened), read_data=True, resume=record)
    flip(Layout(root).block(bytes.fromhex(opened[0])))
    with pytest.raises(KeyboardInterrupt):
        run(root, fs=stopping_after(1, opened := []), read_data=True, resume=record)
    assert "block-damaged" in errors(run(root, read_data=True, resume=record).findings).values()


@pytest.mark.parametrize("content", [b"", b"kvstore-f", b"kvstore-fsck/1\n\0", b"kvstore-fsck/1\n\0" + bytes(4800)])
def test_a_record_may_be_cut_anywhere(root, tmp_path, content):
    record = tmp_path / "record"
    record.write_bytes(content)
    report = run(root, read_data=True, resume=record)
    assert report.exit_code == ExitCode.CLEAN
    assert report.counts.resumed == 0


def test_a_file_of_something_else_is_no_record(root, tmp_path):
    letter = tmp_path / "letter"
    letter.write_text("Dear Ada,")
    report = run(root, read_data=True, resume=letter)
    assert report.exit_code == ExitCode.FAILED
    assert "name another file" in report.error
    assert letter.read_text() == "Dear Ada,"
    report = run(root, read_data=True, resume=tmp_path)
    assert report.exit_code == ExitCode.FAILED
    assert "Is a directory" in report.error


def test_threads_and_processes_see_the_same(root, monkeypatch):
    from kvstore.fsck import passes

    for damage in (
        lambda: flip(block(root, node(root, LONG))),
        lambda: flip(node(root, OTHER)),
        lambda: flip(tokens_entry(root)),
        lambda: future(node(root, GROWN)),
        lambda: node(root, LONG[:16]).chmod(0o640),
    ):
        damage()
    alone = run(root, read_data=True)
    pools = []
    pool = passes.ProcessPoolExecutor
    monkeypatch.setattr(passes, "ProcessPoolExecutor", lambda *args, **kwargs: pools.append(1) or pool(*args, **kwargs))
    monkeypatch.setattr(passes, "PROCESSES_FROM", 0)
    together = run(root, read_data=True, jobs=2)
    assert pools
    assert together.findings == alone.findings
    assert together.counts == alone.counts
    assert len(alone.findings) >= 5


def test_progress_ends_where_it_said_it_would(root):
    told: list[tuple[str, int, int]] = []
    run(root, read_data=True, progress=lambda *args: told.append(args))
    for stage in ("files", "bytes"):
        steps = [(done, total) for name, done, total in told if name == stage]
        assert steps[0] == (0, steps[-1][1])
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        assert steps[-1][0] == steps[-1][1] > 0
