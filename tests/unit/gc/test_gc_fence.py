"""A publish that began before a collection, and commits while it looks at the directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Event, Thread, Timer

from core_support import FAST, open_store
from gc_support import HOUR, ahead, check_valid, prompt, publish, restore, space_of

from kvstore import FileSystem
from kvstore.gc import Policy, collect


@dataclass(frozen=True)
class Halting(FileSystem):
    """Stops before a manifest gets its name, under the publish lock, until it is told to go on."""

    durability: object = FAST.durability
    stopped: Event = field(default_factory=Event)
    go: Event = field(default_factory=Event)

    def rename(self, source, target):
        if str(target).endswith(".kv"):
            self.stopped.set()
            assert self.go.wait(30)
        super().rename(source, target)


def test_what_was_touched_before_the_scan_and_is_named_after_it_stays(writer):
    """The sweep sees no touch, so the marking must see the manifest: it waits for who has the publish lock."""
    space, tokens = space_of(writer), prompt(14)
    publish(space, tokens, 0, 5)
    fs = Halting()
    with open_store(writer.path, None, fs) as other, ahead(writer.path) as later:
        publisher = Thread(target=publish, args=(space_of(other), tokens, 5, 14))
        publisher.start()
        assert fs.stopped.wait(30)

        def pause(point):
            if point == "scanned":
                Timer(0.2, fs.go.set).start()

        report = collect(later.context, Policy(size=0), pause=pause)
        publisher.join()
    assert (report.nodes, report.blocks, report.error) == (1, 0, "")
    check_valid(writer.path)
    assert restore(space, tokens).tokens == 14


def test_what_a_publish_continues_is_young_before_anything_is_written(writer):
    """The first block may take minutes, and a collection meanwhile must not choose what it will stand on."""
    tokens = prompt(32)
    publish(space_of(writer), tokens[:16])

    class Collecting(FileSystem):
        def create(self, path):
            with ahead(writer.path, HOUR) as other:
                assert collect(other.context, Policy(size=0)).nodes == 0
            return super().create(path)

    with ahead(writer.path, HOUR, Collecting(durability=FAST.durability)) as later:
        publish(space_of(later), tokens, 16, 32)
    assert restore(space_of(writer), tokens).tokens == 32
