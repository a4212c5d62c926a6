"""One family's prompts through a cache directory, compared with uninterrupted runs, in two processes.

The first writes and keeps the expected answers, the second has nothing but the directory and those. An uninterrupted
run that is compared with a prefix restored at token r has its prefill cut at r too: kernels may round differently in
pieces of other lengths.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step

from family_runs import (
    ROUNDING,
    STEP,
    STEPS,
    Answer,
    Quantized,
    Uninterrupted,
    difference,
    forward,
    greedy,
    tokens_of,
)
from kvstore.fs import Durability
from kvstore_mlx.boundaries import MIN_TOKENS
from kvstore_mlx.opening import open_session
from kvstore_mlx.plan import leaves_of
from kvstore_mlx.probe import stretches_beyond
from kvstore_mlx.session import Session

__all__ = [
    "ANSWER",
    "INTERVAL",
    "PROMPT",
    "SHORT",
    "Outcome",
    "cuts_of",
    "open_directory",
    "resume",
    "stateful_of",
    "write",
]

INTERVAL = 128
PROMPT = tokens_of(1, 300)
SHORT = tokens_of(2, 100)
"""Shorter than a chunk."""
TINY = tokens_of(3, 20)
"""Too short to be saved."""
ANSWER = 12


@dataclass
class Outcome:
    """What a process found: for each scenario an empty string, or what is wrong."""

    checks: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Scenario:
    """A prompt that is restored up to a token; whole: also what the store should find, were states at every token."""

    name: str
    tokens: list[int]
    shared: int


def _other(shared: int, seed: int) -> list[int]:
    """The prompt's first tokens, then others, the first of which differs."""
    rest = tokens_of(seed, 30)
    rest[0] = PROMPT[shared] % 149 + 1
    return [*PROMPT[:shared], *rest]


BRANCHES = [
    Scenario("branch inside a chunk", _other(200, 11), 200),
    Scenario("cut at an interval", _other(256, 12), 256),
    Scenario("cut one before", _other(255, 13), 255),
    Scenario("cut one after", _other(257, 14), 257),
]


def cuts_of(stateful: bool, tokens: Sequence[int]) -> list[int]:
    """Where kvstore cuts a prefill beside its steps."""
    return list(range(INTERVAL, len(tokens), INTERVAL)) if stateful else []


def open_directory(directory: Path | None, model: Any, row: str, quantized: Quantized) -> Session:
    """A session of the tiny model, named by its row: the weights follow from that."""
    bits: dict[str, Any] = {} if quantized is None else {"kv_bits": quantized[0], "kv_group_size": quantized[1]}
    return open_session(
        directory,
        model,
        identity={"row": row},
        interval=INTERVAL,
        min_tokens=MIN_TOKENS,
        prefill_step=STEP,
        durability=Durability.NONE,
        **bits,
    )


def write(row: str, model: Any, directory: Path, quantized: Quantized = None) -> Outcome:
    """The first process: disabled, first write, repeat, and the answers that the second will be compared with."""
    outcome = Outcome()
    with open_directory(None, model, row, quantized) as disabled:
        stateful = disabled.stateful
        cuts = cuts_of(stateful, PROMPT)
        keep = [128, 256]
        run = Uninterrupted(model, quantized).prefill(PROMPT, cuts, keep if stateful else [])
        before = copy.deepcopy(run.caches)
        expected = run.answer(ANSWER)
        ours = disabled.prefill(PROMPT)
        _compare(outcome, "disabled", _answer(model, ours, quantized), expected)
    if not stateful and quantized is None:
        steps = generate_step(mx.array(PROMPT), model, max_tokens=ANSWER, prefill_step_size=STEP)
        if [int(token) for token, _ in steps] != expected.tokens:
            outcome.checks["disabled"] = "mlx-lm's generate_step gives other tokens"
    _controls(outcome, model, before, expected, quantized)
    answers = {"prompt": expected}
    with open_directory(directory, model, row, quantized) as session:
        first = session.prefill(PROMPT)
        answer = _answer(model, first, quantized)
        _compare(outcome, "first write", answer, expected)
        held = [*PROMPT, *answer.tokens[:-1]]
        session.finish(first, held, count=len(held))
        session.flush()
        again = session.prefill(PROMPT)
        _compare(outcome, "repeat", _answer(model, again, quantized), expected)
        _counted(outcome, "repeat", again.cached_tokens, len(PROMPT))
        short = session.prefill(SHORT)
        answers["short"] = _answer(model, short, quantized)
        session.prefill(TINY)
    answers["short again"] = Uninterrupted(model, quantized).prefill(SHORT, []).answer(ANSWER)
    _compare(outcome, "shorter than a chunk", answers.pop("short"), answers["short again"])
    answers["tiny"] = Uninterrupted(model, quantized).prefill(TINY, []).answer(ANSWER)
    answers.update(_references(model, stateful, run, expected, outcome))
    _save(directory, answers)
    return outcome


def _references(
    model: Any, stateful: bool, run: Uninterrupted, expected: Answer, outcome: Outcome
) -> Iterator[tuple[str, Answer]]:
    """Uninterrupted answers to every prompt of the second process, with the same cuts."""
    quantized = run.quantized
    turn = _turn(expected)
    talk = run.resumed(run.count) if not stateful else run
    answered = talk.resumed(talk.count)
    yield "appended turn", talk.prefill(turn, cuts_of(stateful, turn)).answer(ANSWER)
    for branch in BRANCHES:
        at = resumed_at(branch.shared, stateful)
        cuts = [*cuts_of(stateful, branch.tokens), at]
        yield from _branched(branch, cuts, Uninterrupted(model, quantized), run.resumed(at), outcome)
    branch = _branch_of(turn)
    at = branch.shared if _cuttable(model, stateful, len(turn)) else answered.count
    in_memory = (talk if at > answered.count else answered).resumed(at)
    cuts = [*cuts_of(stateful, branch.tokens), at]
    yield from _branched(branch, cuts, answered, in_memory, outcome)
    longer = [*SHORT, *tokens_of(15, 30)]
    cuts = [*cuts_of(stateful, longer), len(SHORT) - 1, len(SHORT)]
    yield "short, longer", Uninterrupted(model, quantized).prefill(longer, cuts).answer(ANSWER)


def _branched(
    branch: Scenario, cuts: Sequence[int], cut: Uninterrupted, in_memory: Uninterrupted, outcome: Outcome
) -> Iterator[tuple[str, Answer]]:
    """The answer after a prefill that is cut where the branch is resumed, and that of mlx-lm's cache, trimmed there."""
    expected = cut.prefill(branch.tokens, cuts).answer(ANSWER)
    yield branch.name, expected
    in_memory.prefill(branch.tokens, cuts)
    if not np.array_equal(np.array(in_memory.logits.astype(mx.float32)), expected.logits[0]):
        # Rows beside a cut come from longer pieces: what mlx-lm's own cache in memory would answer.
        memory = in_memory.answer(ANSWER)
        found = difference(memory, expected)
        outcome.notes.append(f"{branch.name}: mlx-lm's cache in memory gives other bits ({found})")
        if memory.near(expected, ROUNDING if cut.quantized is None else STEPS):
            yield f"{branch.name} in memory", memory


def _cuttable(model: Any, stateful: bool, count: int) -> bool:
    """Whether caches that hold so many tokens may be cut anywhere."""
    most = stretches_beyond(model)
    return not stateful and (most is None or count <= most)


def resumed_at(shared: int, stateful: bool) -> int:
    """Where a prompt that shares so many tokens with PROMPT is resumed.

    (The store finds a chunk that differs later by hashes of its beginnings; the shortest of them has 64 tokens.)
    """
    return shared // INTERVAL * INTERVAL if stateful or shared % INTERVAL < 64 else shared


def _turn(expected: Answer) -> list[int]:
    """PROMPT, its answer, and what is said next."""
    return [*PROMPT, *expected.tokens, *tokens_of(16, 40)]


def _branch_of(turn: list[int]) -> Scenario:
    """What leaves the turn within the piece that follows the answer."""
    shared = len(PROMPT) + ANSWER + 23
    return Scenario("branch of the turn", [*turn[:shared], turn[shared] % 149 + 1, *tokens_of(17, 29)], shared)


def resume(row: str, model: Any, directory: Path, quantized: Quantized = None) -> Outcome:
    """The second process: everything is restored from the directory.

    Each prompt comes twice, so that what was written after a restore is restored too.
    """
    outcome = Outcome()
    answers = _load(directory)
    with open_directory(directory, model, row, quantized) as session:
        stateful, most = session.stateful, stretches_beyond(model) or 1 << 40

        def check(name: str, label: str, tokens: list[int], cached: int) -> None:
            run = session.prefill(tokens)
            ours = _answer(model, run, quantized)
            _counted(outcome, label, run.cached_tokens, cached)
            memory = answers.get(f"{name} in memory")
            if memory is not None and ours.same(memory):
                outcome.checks.setdefault(label, "")
            else:
                _compare(outcome, label, ours, answers[name])
            session.flush()
            if len(tokens) >= 64:
                again = session.prefill(tokens)
                _counted(outcome, label, again.cached_tokens, len(tokens) if len(tokens) <= most else cached)
                if not _answer(model, again, quantized).same(ours):
                    outcome.checks[label] = "another answer when repeated"

        check("prompt", "restart", PROMPT, len(PROMPT))
        turn = _turn(answers["prompt"])
        answered = len(PROMPT) + ANSWER - 1
        check("appended turn", "appended turn", turn, answered)
        branch = _branch_of(turn)
        at = branch.shared if _cuttable(model, stateful, len(turn)) else answered
        check(branch.name, branch.name, branch.tokens, at)
        for branch in BRANCHES:
            check(branch.name, branch.name, branch.tokens, resumed_at(branch.shared, stateful))
        check("short again", "shorter than a chunk", SHORT, len(SHORT))
        check("short, longer", "shorter than a chunk", [*SHORT, *tokens_of(15, 30)], len(SHORT))
        check("tiny", "shorter than a chunk", TINY, 0)
    return outcome


def _answer(model: Any, run: Any, quantized: Quantized) -> Answer:
    return greedy(model, run.caches, run.logits, ANSWER, quantized)


def _compare(outcome: Outcome, name: str, ours: Answer, expected: Answer) -> None:
    problem = "" if ours.same(expected) else difference(ours, expected)
    outcome.checks[name] = outcome.checks.get(name) or problem


def _counted(outcome: Outcome, name: str, cached: int, expected: int) -> None:
    if cached != expected and not outcome.checks.get(name):
        outcome.checks[name] = f"{cached} tokens were restored instead of {expected}"


def _controls(outcome: Outcome, model: Any, caches: list[Any], expected: Answer, quantized: Quantized) -> None:
    """Whether the answers could tell: the first token reaches the last logits, and so does what each layer holds."""
    changed = [PROMPT[0] % 149 + 1, *PROMPT[1:]]
    other = Uninterrupted(model, quantized).prefill(changed, [])
    # Bits would do, but a model that hardly looks is a bad witness.
    finite = np.isfinite(expected.logits[0])
    before, after = expected.logits[0][finite], np.array(other.logits)[finite]
    moved = np.abs(after - before).max() / before.std()
    outcome.checks["control"] = "" if moved > 1e-3 else f"the first token moves the last logits by {moved:.1e} only"
    if quantized is None and len(set(expected.tokens)) < 4:
        outcome.checks["control"] = f"greedy output repeats itself: {expected.tokens}"
    plain = np.array(forward(model, copy.deepcopy(caches), [5]))
    for name, _ in leaves_of(caches):
        disturbed = copy.deepcopy(caches)
        (leaf,) = (leaf for other_name, leaf in leaves_of(disturbed) if other_name == name)
        _disturb(leaf)
        if np.array_equal(np.array(forward(model, disturbed, [5])), plain):
            outcome.checks["control"] = f"what cache {name} holds does not reach the logits"


def _disturb(cache: Any) -> None:
    """Change every number a cache holds, and their order: some caches only say which rows to look at."""
    for name, value in vars(cache).items():
        if isinstance(value, (list, tuple)):
            setattr(cache, name, type(value)(_other_numbers(each) for each in value))
        else:
            setattr(cache, name, _other_numbers(value))


def _other_numbers(value: Any) -> Any:
    if not isinstance(value, mx.array):
        return value
    if not mx.issubdtype(value.dtype, mx.floating):
        return value + 1  # tokens
    return value * mx.random.uniform(0.2, 1.8, value.shape, key=mx.random.key(1)).astype(value.dtype)


def _save(directory: Path, answers: dict[str, Answer]) -> None:
    arrays: dict[str, Any] = {}
    for name, answer in answers.items():
        arrays[f"{name}/tokens"] = np.array(answer.tokens)
        arrays[f"{name}/logits"] = answer.logits
    np.savez(directory.with_suffix(".npz"), **arrays)


def _load(directory: Path) -> dict[str, Answer]:
    with np.load(directory.with_suffix(".npz")) as arrays:
        names = [name.removesuffix("/tokens") for name in arrays.files if name.endswith("/tokens")]
        return {name: Answer(arrays[f"{name}/tokens"].tolist(), arrays[f"{name}/logits"]) for name in names}


def stateful_of(model: Any, row: str) -> bool:
    """Whether the family is resumed at boundary states only; raises UnsupportedModelError when it is not cached."""
    with open_directory(None, model, row, None) as session:
        return session.stateful
