"""Reclaim space: remove garbage, and what was used least recently when the directory is over its budget.

Mark and sweep. Marking looks at every file and reads every manifest, without a lock, and takes as long as it takes;
sweeping holds the publish lock for milliseconds at a time. All the while the directory goes on changing. This is why
nothing is lost, whatever any clock says:

- A publisher touches everything that its new manifest stands on, blocks and the parent's manifest, under the publish
  lock and before it renames. The sweep looks again under that lock and leaves what was touched since it was looked at.
- Between looking at the times and listing the manifests that are to be marked, a collection takes the publish lock once
  (the fence). A manifest renamed before the fence is listed, so its blocks and its parent are in use; one renamed after
  it was preceded by touches that the sweep sees.
- A publisher that comes after the sweep finds under the lock that something is missing, and fails before its commit
  point.
- A lookup refreshes a node's time, and the sweep leaves it for the same reason. Within the hour in which a lookup does
  not, the files it opened survive their names, and what this process looked up is protected by path.

New files are young besides, and nothing young is removed (eviction.PROTECT_NS, eviction.GRACE_NS): that keeps what was
just used, and what comes without the protocol, as rsync does. What rsync found here and left out it does not keep: a
block goes with its last manifest, and what the copy brings for it is a miss until it is copied again.

Order of removal: manifests, children before parents; then a sync of their folders; then blocks that no manifest names.
So a kill anywhere leaves a valid directory, with unreferenced blocks at worst, which a later collection removes. A
power cut may also bring a child back without its parent (a sync for every generation would cost a hundred times the
rest): nothing finds it, and it is evicted in its turn.

What marking cannot see stops it. An I/O error: nothing at all is removed. A manifest that is damaged or of a newer
version: no block is taken for unreferenced that it may name, so blocks that no manifest names stay, and its siblings'
too; the rest is collected as usual. A damaged manifest that nobody touched for a day will not become whole: no copy is
at it, and who publishes its prefix again brings blocks of his own. From then on it keeps no unreferenced blocks (one
bad file would keep the garbage of the whole directory for ever), and may be evicted in its turn; `kvstore fsck
--repair` sets it aside at once. One of a newer version is never touched, and keeps what it may name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import TypeAlias

from kvstore.collected import GcReport
from kvstore.context import Context, this_process
from kvstore.directory import advice
from kvstore.errors import KVStoreError
from kvstore.eviction import FUTURE_NS, GRACE_NS, PROTECT_NS, Plan, Policy, choose, clock_was_ahead, is_protected, young
from kvstore.layout import Layout
from kvstore.locks import gc_lock
from kvstore.marking import Marked, Marks, mark
from kvstore.pacing import paced
from kvstore.scan import HashedFile, NodeFile, Scan, appeared, free_bytes, scan, usage
from kvstore.sweep import Doomed, Pause, Sweeper, batches, changed, in_disk_order, path_of

__all__ = ["GcReport", "Policy", "Progress", "collect", "usage"]

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with a stage, how much of it is done, and how much there is: files (0, as nobody knows before they are
counted), manifests, then bytes to be freed.
"""

FOREIGN_STAGING_NS = 24 * 3600 * 10**9
"""A staging folder of another machine (a shared volume) is stale after this long: whether its process runs cannot be
asked, and a staged file is written and renamed within seconds."""

QUARANTINE_NS = 30 * 24 * 3600 * 10**9
"""What fsck set aside is kept this long for a person to look at, and longer while there is room."""

_LONGEST_REST_S = 1.0
"""A hold of the lock is ten milliseconds of work at once, and a server's share of it may be one or two hundredths."""

_ROUND = 8192
"""Manifests removed before their folders are synced and their blocks follow: there are 256 folders a namespace to sync,
so the more share one the better; a kill in between leaves the blocks of these for a later collection."""


def collect(
    context: Context,
    policy: Policy | None = None,
    *,
    pause: Pause = lambda _: None,
    progress: Progress = lambda _stage, _done, _total: None,
) -> GcReport:
    """Collect once. Never raises for what the directory or the file system does: see GcReport.error.

    A dry run takes no lock and works on a directory that cannot be written. pause is called at named points: scanned,
    marked, planned, batch (a lock was released), unnamed (manifests are gone, their blocks not yet). progress is called
    without a lock.
    """
    policy = policy or Policy()
    report = GcReport(dry_run=policy.dry_run)
    collection = _Collection(context, policy, report, pause, progress)
    try:
        if policy.dry_run:
            collection.run()
        else:
            with gc_lock(context.layout) as mine:
                report.busy = not mine
                if mine:
                    collection.run()
    except (OSError, KVStoreError) as error:
        report.error = _sentence(error)
    return report


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"stopped, because {where}{advice(error)}"
    return f"stopped, because {error}"


class _Collection:
    """One run of collect."""

    def __init__(self, context: Context, policy: Policy, report: GcReport, pause: Pause, progress: Progress) -> None:
        self._context = context
        self._policy = policy
        self._report = report
        self._pause = pause
        self._progress = progress
        self._doomed = 0
        self._rest = context.pace.resting(_LONGEST_REST_S)
        self._sweeper = Sweeper(context, pause, dry_run=policy.dry_run, told=self._tell, rest=self._rest)
        self._now = context.clock()
        self._free = 0
        self._removed: set[int] = set()

    def run(self) -> None:
        """Mark, plan and sweep. Errors end it early and are reported."""
        report, sweeper = self._report, self._sweeper
        started = time.monotonic()
        try:
            found, marks = self._look()
            report.mark_seconds = time.monotonic() - started
            self._pause("marked")
            self._reclaim(found, marks)
        except (OSError, KVStoreError) as error:
            report.error = _sentence(error)
        report.sweep_seconds = time.monotonic() - started - report.mark_seconds
        report.rested_seconds = self._rest.seconds
        report.freed_bytes = sweeper.freed
        report.after_bytes = report.before_bytes - sweeper.freed
        report.skipped, report.failed = sweeper.skipped, sweeper.failed
        if not report.dry_run:
            self._context.counters.add(collected_nodes=report.nodes, collected_bytes=report.freed_bytes)

    def _look(self) -> tuple[Scan, Marks]:
        """All files, and what the manifests name."""
        report, policy = self._report, self._policy
        found = scan(self._context, lambda files: self._progress("files", files, 0), self._rest)
        report.before_bytes = found.tally.allocated
        report.foreign = found.tally.foreign
        self._pause("scanned")
        with self._sweeper.lock():  # the fence
            pass
        fresh = appeared(self._context.layout, found.nodes, self._rest)
        marks = mark(self._context, found.nodes, fresh, partial(self._progress, "manifests"), self._rest)
        report.damaged = len(marks.unreadable)
        if policy.min_free is not None:
            self._free = free_bytes(self._context)
        return found, marks

    def _tell(self, freed: int) -> None:
        """What is freed of what shall be: more, when tokenizations or what was set aside go beside the plan."""
        if total := max(freed, self._doomed):
            self._progress("bytes", freed, total)

    def _reclaim(self, found: Scan, marks: Marks) -> None:
        self._remove_staging(found)
        self._remove_orphans(found, marks)
        _, need = self._missing()
        if need > 0:
            need -= self._remove_quarantined(found, need)
        limits = self._limits()
        over = self._over(limits, found, marks)
        plan = choose(
            self._context,
            marks,
            found.blocks,
            self._policy,
            need=need,
            now_ns=self._now,
            over=over,
            rest=self._rest,
        )
        self._report.coldest_ns = plan.coldest_ns
        self._pause("planned")
        self._doomed = self._sweeper.freed + plan.freed
        self._tell(self._sweeper.freed)
        self._remove_nodes(plan, found, marks)
        self._remove_tokenizations(found, plan)
        self._report.unmet_bytes, _ = self._missing()
        for namespace, used in _namespace_bytes(over, found, marks, self._removed).items():
            missing = max(0, used - limits[namespace])
            if self._policy.size is not None and namespace == self._policy.namespace:
                self._report.unmet_bytes = max(self._report.unmet_bytes, missing)
            else:
                self._report.over_quota_bytes += missing
        if self._report.unmet_bytes or self._report.over_quota_bytes:
            times = [(node.file.mtime_ns, node.file.ctime_ns) for node in marks.nodes]
            times += [(block.mtime_ns, block.ctime_ns) for block in found.blocks.values()]
            self._report.future = sum(clock_was_ahead(*each, self._now) for each in times)

    def _limits(self) -> Mapping[str, int]:
        """Bytes that namespaces may take: their quotas, or an explicit size instead of one."""
        policy = self._policy
        if policy.namespace is None:
            return policy.quotas
        limit = policy.quotas.get(policy.namespace) if policy.size is None else policy.size
        return {} if limit is None else {policy.namespace: limit}

    def _over(self, limits: Mapping[str, int], found: Scan, marks: Marks) -> dict[str, int]:
        """Bytes to free of each namespace that takes more than its limit, a tenth of it to spare."""
        used = _namespace_bytes(limits, found, marks)
        return {name: used[name] - limit * 9 // 10 for name, limit in limits.items() if used[name] > limit}

    def _missing(self) -> tuple[int, int]:
        """Bytes still to free until the policy is met, and until there is something to spare.

        That is for the next writes: without it each of them would set off a collection of its own.
        """
        policy, freed = self._policy, self._sweeper.freed
        unmet = need = 0
        if policy.size is not None and policy.namespace is None:
            used = self._report.before_bytes - freed
            if used > policy.size:
                spare = policy.size // 10 if policy.spare is None else policy.spare
                unmet, need = used - policy.size, used - max(0, policy.size - spare)
        if policy.min_free is not None and self._free + freed < policy.min_free:
            unmet = max(unmet, policy.min_free - self._free - freed)
            need = max(need, policy.min_free * 11 // 10 - self._free - freed)
        return unmet, need

    def _remove_staging(self, found: Scan) -> None:
        """Remove folders that killed processes left. Those of running ones are left alone, however old.

        Even one whose owner is surely gone must have rested: in a container the same process number may be another's.
        """
        host = this_process().host
        for folder in found.staging:
            here = folder.owner.host == host
            if young(folder.newest_ns, folder.newest_ns, self._now, PROTECT_NS if here else FOREIGN_STAGING_NS):
                continue
            if not here or folder.owner.surely_gone():
                self._report.staging += self._sweeper.remove_folder(folder.path, folder.allocated)

    def _remove_orphans(self, found: Scan, marks: Marks) -> None:
        """Remove blocks that no manifest names, once they are past grace, and unless a manifest that could not be read
        may name them: one that changed within the day, one of a newer version, or those in a hidden folder.
        """
        every = paced(found.blocks.items(), self._rest)
        orphans = [block for digest, block in every if digest not in marks.named]
        old = [block for block in orphans if not young(block.mtime_ns, block.ctime_ns, self._now, GRACE_NS)]
        if found.tally.hidden or any(
            node.unreadable == "newer" or young(node.file.mtime_ns, node.file.ctime_ns, self._now, GRACE_NS)
            for node in marks.unreadable
        ):
            old = []
        self._report.waiting = len(orphans) - len(old)
        self._doomed = self._sweeper.freed + sum(block.allocated for block in old)
        self._report.orphans = self._remove_blocks(old)

    def _remove_quarantined(self, found: Scan, need: int) -> int:
        """Remove what was set aside long ago, oldest first, until need bytes are freed; returns how many were."""
        before = self._sweeper.freed
        for file in sorted(found.quarantine, key=lambda file: file.ctime_ns):
            if self._sweeper.freed - before >= need:
                break
            moved = Layout.set_aside_ns(file.path.name)
            lately = self._now - QUARANTINE_NS < moved <= self._now + FUTURE_NS
            if not lately and not young(file.mtime_ns, file.ctime_ns, self._now, QUARANTINE_NS):
                self._report.quarantined += self._sweeper.remove(Doomed(*file))
        return self._sweeper.freed - before

    def _remove_nodes(self, plan: Plan, found: Scan, marks: Marks) -> None:
        """Remove the victims, and the blocks that nothing names any more."""
        base = f"{self._context.layout.nodes}/"

        def manifest_of(index: int) -> tuple[str]:
            file = marks.nodes[index].file
            return (f"{base}{file.namespace}/{file.file[:2]}/{file.file}",)

        kept: set[str] = set()
        beside = _kv_beside_states(plan, marks)
        for victims in batches(plan.victims, _ROUND):
            unnamed: list[HashedFile] = []
            # In this order: children's before their parents', as far as they differ.
            folders: dict[tuple[str, str], None] = {}
            with self._sweeper.in_short_holds(in_disk_order(victims, marks, self._rest), manifest_of) as held:
                for index in held:
                    node = marks.nodes[index]
                    name, above = node.file.place, node.file.above
                    # What stays keeps its ancestors: a child is never without its parent, nor a state without KV.
                    if name in kept or not self._remove_manifest(node.file, beside.get(index)):
                        kept.update((name, above))
                        continue
                    self._removed.add(index)
                    folders[node.file.namespace, node.file.parent[:2]] = None
                    unnamed.extend(_drop(node, found, marks))
            for folder in folders:
                self._sweeper.sync(self._context.layout.node_folder(*folder))
            self._pause("unnamed")
            self._remove_blocks(
                [
                    block
                    for block in unnamed
                    if not young(block.mtime_ns, block.ctime_ns, self._now, self._policy.protect_ns)
                ]
            )

    def _remove_manifest(self, file: NodeFile, beside: NodeFile | None) -> bool:
        """Remove a victim if it is still one. beside: for a state, the KV's manifest, which shows that it was used."""
        used = [Doomed.node(self._context.layout, each) for each in (file, beside) if each is not None]
        if any(is_protected(self._context, self._policy, each.path, self._now) for each in used) or changed(used[-1]):
            self._sweeper.skipped += 1
            return False
        if not self._sweeper.remove(used[0]):
            return False
        self._report.nodes += file.kind == "kv"
        self._report.states += file.kind == "state"
        return True

    def _remove_blocks(self, blocks: list[HashedFile]) -> int:
        """Remove blocks, neighbours on disk together (see in_disk_order); how many went."""
        folder = self._context.layout.blocks
        blocks.sort(key=lambda block: block.inode)
        removed = self._sweeper.remove_all([Doomed.hashed(folder, block) for block in blocks])
        self._report.blocks += removed
        return removed

    def _remove_tokenizations(self, found: Scan, plan: Plan) -> None:
        """Remove tokenizations not used since the last node that went, and more when only they are left to go.

        They cost little to make again, but they take little too: they go with their conversations, not before them.
        """
        if self._policy.namespace is not None:
            return
        folder = self._context.layout.tokens
        old = [Doomed.hashed(folder, file) for file in sorted(found.tokenizations, key=attrgetter("mtime_ns"))]
        with self._sweeper.in_short_holds(old, path_of) as held:
            for file in held:
                if file.mtime_ns >= plan.horizon_ns and not self._missing()[0]:
                    return
                if not young(file.mtime_ns, file.ctime_ns, self._now, PROTECT_NS):
                    self._report.tokenizations += self._sweeper.remove(file)


def _kv_beside_states(plan: Plan, marks: Marks) -> dict[int, NodeFile]:
    """For each state among the victims, the manifest of its node's KV."""
    files = {index: marks.nodes[index].file for index in plan.victims}
    states = {file.place: index for index, file in files.items() if file.kind == "state"}
    if not states:
        return {}
    kvs = (node.file for node in marks.nodes if node.file.kind == "kv")
    return {states[name]: file for file in kvs if (name := file.place) in states}


def _drop(node: Marked, found: Scan, marks: Marks) -> Iterator[HashedFile]:
    """Forget a removed manifest's references; the blocks that no manifest names now."""
    for digest in {digest for digest, _ in node.blocks}:
        marks.named[digest] -= 1
        if not marks.named[digest] and digest in found.blocks:
            yield found.blocks[digest]


def _namespace_bytes(
    namespaces: Collection[str], found: Scan, marks: Marks, removed: Collection[int] = ()
) -> dict[str, int]:
    """Bytes on disk of each namespace's manifests and of the blocks they name. removed: indices of those that are gone.

    One pass over all nodes, for any number of namespaces.
    """
    used = dict.fromkeys(namespaces, 0)
    named: dict[str, set[bytes]] = {namespace: set() for namespace in used}
    if used:
        for index, node in enumerate(marks.nodes):
            if (namespace := node.file.namespace) in used and index not in removed:
                used[namespace] += node.file.allocated
                named[namespace].update(digest for digest, _ in node.blocks if digest in found.blocks)
    return {name: size + sum(found.blocks[digest].allocated for digest in named[name]) for name, size in used.items()}
