"""kvstore passes its own public conformance suite, and the suite catches stores that do not keep the promises."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from record_support import Tally, counted

from kvstore import Span, State, Store, TensorSpec
from kvstore.restore import Restored
from kvstore.scatter import scatter
from kvstore.testing import TENSORS, DirectorySubject, Model, Oracle, Subject, random_tokens, store_machine

ROOT = Path(__file__).resolve().parents[2]

# Histories whose steps take turns of seconds on a busy machine are no finding, and what fails is printed as a program.
QUIET = settings(
    deadline=None, database=None, print_blob=True, stateful_step_count=30, suppress_health_check=list(HealthCheck)
)
SMALL = settings(QUIET, max_examples=int(os.environ.get("KVSTORE_EXAMPLES", "35")), derandomize=True)
SOAK_EXAMPLES = int(os.environ.get("KVSTORE_SOAK_EXAMPLES", "2600"))

MACHINES = {
    "matches inside a chunk": store_machine(DirectorySubject),
    "many chunks": store_machine(DirectorySubject, interval=16),
    "nothing per token": store_machine(DirectorySubject, interval=64, tensors=()),
    "one tensor": store_machine(DirectorySubject, interval=80, tensors=[TensorSpec("k", "F16", 1, (1,))]),
}


@pytest.fixture(autouse=True)
def _quick_and_quiet(monkeypatch):
    """In memory where there is such a place; and damage is on purpose here, one line for each would be thousands."""
    if os.access("/dev/shm", os.W_OK):
        monkeypatch.setattr("tempfile.tempdir", "/dev/shm")
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", MACHINES)
def test_kvstore_conforms(name):
    run_state_machine_as_test(MACHINES[name], settings=SMALL)


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("name", MACHINES)
def test_kvstore_conforms_at_length(name, record_property):
    """8,450 histories in all, others every time; what fails prints the seed to repeat it."""
    share = {"matches inside a chunk": 1.5, "nothing per token": 0.25, "one tensor": 0.5}.get(name, 1)
    tally, examples = Tally(), int(SOAK_EXAMPLES * share)
    record_property(
        "what", "Histories against the model of `kvstore.testing`: publish, grow, damage, heal, collect, repair"
    )
    try:
        run_state_machine_as_test(counted(MACHINES[name], tally), settings=settings(QUIET, max_examples=examples))
    finally:
        for each in tally.items():
            record_property(*each)
    assert tally["histories"] >= examples


@pytest.mark.parametrize("number", range(4))
def test_what_was_healed_may_be_cut_otherwise(number):
    """A prefix whose first block is lost comes back as one block; the model went on to publish from the border that was
    there before. number: which file of two tails is lost, a block of both among them.
    """
    machine = MACHINES["many chunks"]()
    try:
        prompt = machine.first_prompt(seed=0, count=2)
        for end in (1, 2):
            machine.publish(at=0, space=0, prompt=prompt, end=end, cuts=[], start="restored", decode=False, phase=0)
        assert len(list(machine.session.subject.files())) == 4
        machine.harm(which=[number], how="delete")
        machine.heal(space=0, prompt=prompt, end=2, order=[0, 1])
        machine.repair()
        machine.publish(at=0, space=0, prompt=prompt, end=2, cuts=[1], start="border", decode=False, phase=0)
    finally:
        machine.teardown()


# Stores with a mistake in them, each of which a history must bring to light.


class Wrapped:
    """A namespace of kvstore with one method of its own."""

    def __init__(self, space) -> None:
        self.space = space

    def __getattr__(self, name):
        return getattr(self.space, name)


class Wrapping:
    """A store whose namespaces are wrapped."""

    wrap: type[Wrapped]

    def __init__(self, store) -> None:
        self.store = store

    def namespace(self, info):
        return self.wrap(self.store.namespace(info))

    def close(self) -> None:
        self.store.close()


class IgnoresSalt(Wrapping):
    wrap = Wrapped

    def namespace(self, info):
        return self.store.namespace(replace(info, salt=b""))


class CutsWrongly(Wrapped):
    """Takes the block of a span for that of the tokens one further on, if it begins inside a chunk."""

    def publish(self, tokens, spans):
        wrong = [
            Span(span.first, span.count, span.specs, [bytes(part)[::-1] for part in span.data])
            if span.first % 128 > 64
            else span
            for span in spans
        ]
        return self.space.publish(tokens, wrong)


class FindsMore(Wrapped):
    """Says one token more than it has when a match ends inside a chunk."""

    def lookup(self, tokens, *, trimmable=True):
        match = self.space.lookup(tokens, trimmable=trimmable)
        return match if match.exact else replace(match, count=match.count + 1)


class ForgetsTails(Wrapped):
    """Finds full chunks only."""

    def lookup(self, tokens, *, trimmable=True):
        match = self.space.lookup(tokens, trimmable=trimmable)
        steps = tuple(step for step in match.steps if step.name.count == 128)
        end = steps[-1].end if steps else 0
        return replace(match, steps=steps, count=end, border=end, exact=True)


class MixesStates(Wrapped):
    """Hands out the state of other tokens."""

    def publish_state(self, tokens, state):
        return self.space.publish_state(tokens, State(state.tensors, [b"?" * len(part) for part in state.data]))


class SavesOrphans(Wrapped):
    """Pretends that a publish without what comes before it went well."""

    def publish(self, tokens, spans):
        try:
            return self.space.publish(tokens, spans)
        except Exception:
            return None


class TrustsTheDisk(DirectorySubject):
    """Serves what it read, whatever its digest is: see the test."""


class LosesParents(DirectorySubject):
    """Collects by tossing coins."""

    def collect(self, share):
        for path in sorted((self.folder / "objects" / "nodes").rglob("*.kv"))[::2]:
            path.unlink()


class LeavesHoles(DirectorySubject):
    """Takes a chunk without tensors for the next one of a prompt that has some: see the test."""


def subject(wrap):
    if issubclass(wrap, Subject):
        return wrap
    store = wrap if issubclass(wrap, Wrapping) else type(wrap.__name__, (Wrapping,), {"wrap": wrap})
    return type(wrap.__name__, (DirectorySubject,), {"open": lambda self: store(DirectorySubject.open(self))})


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (IgnoresSalt, "found .* tokens, not|WRONG BYTES"),
        (CutsWrongly, "WRONG BYTES"),
        (FindsMore, "found .* tokens, not"),
        (ForgetsTails, "found .* tokens, not"),
        (MixesStates, "WRONG"),
        (SavesOrphans, "without what comes before it"),
        (TrustsTheDisk, "WRONG BYTES"),
        (LosesParents, "continue"),
        (LeavesHoles, "in one part and without in another"),
    ],
)
def test_the_suite_finds(mistake, said, monkeypatch):
    if mistake is TrustsTheDisk:
        monkeypatch.setattr("kvstore.restore.scatter", read_trustingly)
    elif mistake is LeavesHoles:
        monkeypatch.setattr("kvstore.publish._check_alike", lambda span, before: None)
    machine = store_machine(subject(mistake))
    found = settings(QUIET, max_examples=200, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError, match=said):
        run_state_machine_as_test(machine, settings=found)


class RestoresNothing(Wrapped):
    """Finds what was saved without tensors, and takes that there is nothing to read for nothing restored."""

    def read(self, match, allocate):
        return Restored(0, 0, 0)


class RestoresMore(Wrapped):
    """Takes all tokens of the last node for restored, where the prompt goes on differently, too."""

    def read(self, match, allocate):
        restored = self.space.read(match, allocate)
        return replace(restored, tokens=restored.tokens + 1) if restored.tokens > 64 else restored


class AsksForMemory(Wrapped):
    """Asks for memory without tensors to put there."""

    def read(self, match, allocate):
        if match.count:
            allocate((), match.count)
        return self.space.read(match, allocate)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (RestoresNothing, "restored 0 of the .* that were found"),
        (RestoresMore, "restored .* tokens with a border .* that were found"),
        (AsksForMemory, "memory for .* was asked for"),
    ],
)
def test_the_suite_finds_a_wrong_read_where_nothing_is_kept_per_token(mistake, said):
    machine = store_machine(subject(mistake), interval=64, tensors=())
    found = settings(QUIET, max_examples=200, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError, match=said):
        run_state_machine_as_test(machine, settings=found)


def read_trustingly(blocks, memory, threads) -> list[None]:
    scatter(blocks, memory, threads)
    return [None] * len(blocks)


def test_the_model_knows_when_a_match_inside_a_chunk_must_be_found():
    model = Model(128)
    known, other = random_tokens(1, 100), random_tokens(2, 100)
    model.add(known, frozenset({100}), 0, frozenset())
    assert model.promise(known[: 4 * 63] + other, 0) == 0
    assert model.promise(known[: 4 * 70] + other, 0) == 70
    assert model.promise(known + other, 0) == 100
    assert Model(128, overlaps=False, saved=model.saved, ever=model.ever).promise(known[: 4 * 70] + other, 0) == 0
    model.doubt_all()
    assert model.promise(known + other, 0) == 0
    assert model.most(known + other) == 100


def test_the_bytes_of_a_token_depend_on_all_before_it():
    oracle, other = Oracle(), Oracle(who="other")
    tokens = random_tokens(1, 40)
    assert oracle.kv(tokens, 30, 40) == oracle.kv(tokens[: 4 * 40], 30, 40)
    assert oracle.kv(tokens, 30, 40) != oracle.kv(bytes(4) + tokens[4:], 30, 40)
    assert oracle.kv(tokens, 30, 40) != other.kv(tokens, 30, 40)
    assert [len(part) for part in oracle.kv(tokens, 30, 40)] == [spec.span_bytes(10) for spec in TENSORS]


def test_the_example_in_the_docs_runs(tmp_path):
    code, _ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "testing.md").read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    names: dict[str, object] = {"Path": Path}
    exec(compile(code, "docs/testing.md", "exec"), names)
    case = names["TestMyStore"]
    assert isinstance(case, type)
    case.settings = settings(SMALL, max_examples=5)
    case("runTest").runTest()


def test_neither_kvstore_nor_the_suite_needs_pytest_and_kvstore_not_even_hypothesis():
    code = (
        "import sys, kvstore.testing; assert 'hypothesis' not in sys.modules\n"
        "from kvstore.testing import store_machine\n"
        "assert 'pytest' not in sys.modules and 'hypothesis' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_hypothesis_a_sentence_says_what_to_install():
    code = (
        "import sys; sys.modules['hypothesis'] = sys.modules['hypothesis.strategies'] = None\n"
        "import kvstore.testing\n"
        "try: from kvstore.testing import store_machine\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "pip install 'kvstore-llm[testing]'" in done.stdout


def test_histories_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_state_machine_as_test(MACHINES["many chunks"], settings=settings(SMALL, max_examples=3))
    assert list(tmp_path.iterdir()) == []
    shutil.rmtree(tmp_path)


def test_a_store_of_ones_own_needs_only_open(tmp_path):
    class Least(Subject):
        def open(self):
            return Store.open(self.folder, interval=self.interval)

    run_state_machine_as_test(store_machine(Least, overlaps=False), settings=settings(SMALL, max_examples=3))
