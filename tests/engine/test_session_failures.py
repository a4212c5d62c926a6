"""What fails in the cache of a session costs an answer nothing but the cache, and is said once."""

from __future__ import annotations

import errno
import logging
import math
import os
import threading

import mlx.core as mx
import pytest
from mlx_lm import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from session_support import PROMPT, opener, session_of

from kvstore.errors import TokenError, UnavailableError
from kvstore.stats import read_stats
from kvstore.store import Namespace, Store
from kvstore_mlx import fetching
from kvstore_mlx.gate import Gate
from kvstore_mlx.guard import Guard
from kvstore_mlx.live import Extras
from kvstore_mlx.metrics import Metrics
from kvstore_mlx.recording import Recording

ERRORS = [ValueError("no such layer"), MemoryError(), RuntimeError("a bug"), OSError(24, "too many files")]


@pytest.fixture(scope="module")
def wanted(loaded):
    return [each.token for each in stream_generate(*loaded, PROMPT, max_tokens=8)]


@pytest.fixture
def opened(loaded, tiny_llama, tmp_path):
    return opener(loaded, tiny_llama, tmp_path, interval=128, prefill_step=128)


def unavailable_by(number):
    def fail():
        raise UnavailableError("it cannot be used") from OSError(number, os.strerror(number))

    return fail


def answered(cache, prompt=PROMPT):
    return [each.token for each in cache.stream_generate(prompt, max_tokens=8)]


def failing(error):
    def fail(*_, **__):
        raise error

    return fail


STEPS = [
    (fetching, "find"),
    (fetching, "restore"),
    (Gate, "worth_restoring"),
    (Gate, "worth_saving"),
    (Recording, "__init__"),
    (Recording, "prepare"),
    (Recording, "reached"),
    (Recording, "finished"),
    (Recording, "_save"),
    (Metrics, "fetched"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step[1])
def test_an_answer_goes_on(opened, wanted, monkeypatch, caplog, step, error):
    with opened() as cache:
        cache.prefill(cache.tokens_of(PROMPT)[:200])
    with opened() as cache, monkeypatch.context() as broken:
        broken.setattr(*step, failing(error))
        assert answered(cache) == wanted
        assert cache.failures >= 1
        lines = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert len(lines) == 1
        assert (str(error) or "not enough memory") in lines[0].getMessage() or lines[0].exc_info
        assert "goes on without the cache" in lines[0].getMessage()
        assert ("bug" in lines[0].getMessage()) == isinstance(error, RuntimeError)
    # What was saved until then, or by another answer later, is as good as ever.
    with opened() as cache:
        assert answered(cache) == wanted
    with opened() as cache:
        assert answered(cache) == wanted
        assert cache.failures == 0


@pytest.mark.parametrize("step", STEPS[:-1], ids=lambda step: step[1])
def test_an_interrupt_passes(opened, monkeypatch, step):
    with opened() as cache:
        cache.prefill(cache.tokens_of(PROMPT)[:200])
    with opened() as cache, monkeypatch.context() as broken:
        broken.setattr(*step, failing(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            answered(cache)
        assert cache.failures == 0


def test_what_failed_is_not_tried_again_in_the_same_answer(opened, wanted, monkeypatch):
    with opened() as cache, monkeypatch.context() as broken:
        broken.setattr(Recording, "reached", failing(ValueError("no such layer")))
        assert answered(cache) == wanted
        assert cache.failures == 1


def test_a_prompt_with_images_is_computed_and_not_saved(loaded, opened, caplog):
    caplog.set_level("INFO", "kvstore")
    prompt = [*loaded[1].encode(PROMPT), -1, 7]
    wanted = [each.token for each in stream_generate(*loaded, prompt, max_tokens=8)]
    with opened() as cache:
        assert answered(cache, prompt) == wanted
        assert [each.getMessage() for each in caplog.records if "images" in each.getMessage()]
        assert cache.restore(prompt) is None
        cache.publish(prompt, make_prompt_cache(loaded[0]))
        run = cache.prefill(prompt)
        assert (run.cached_tokens, run.recording, cache.failures) == (0, None, 0)
        cache.finish(run, prompt)


def test_what_is_no_number_is_the_caller_s_mistake(opened):
    with opened() as cache:
        for call in (cache.restore, cache.prefill, lambda tokens: cache.publish(tokens, [])):
            with pytest.raises(TokenError):
                call(["a", "b"])


def test_restore_and_publish_by_hand_go_on(loaded, opened, monkeypatch):
    tokens = loaded[1].encode(PROMPT)
    with opened() as cache:
        caches = cache.prefill(tokens).caches
        cache.flush()
        with monkeypatch.context() as broken:
            broken.setattr(Namespace, "lookup", failing(MemoryError()))
            assert cache.restore(tokens) is None
            cache.publish(tokens, caches)
        assert cache.failures == 2
        assert cache.restore(tokens).tokens == len(tokens)
        with pytest.raises(ValueError, match="tokens where"):
            cache.finish(cache.prefill([*tokens, 5]), [*tokens, 5, 6, 7])


class Counter:
    """A hook that counts what it was told."""

    name = "counter/1"

    def __init__(self) -> None:
        self.told: list[object] = []

    def capture(self) -> Extras:
        return Extras({}, {"at": 1})

    def restore(self, extras) -> None:
        self.told.append(extras)


def test_a_hook_begins_anew_when_a_restore_fails(opened, wanted, monkeypatch):
    with opened(extras=Counter()) as cache:
        assert answered(cache) == wanted
    with opened(extras=(hook := Counter())) as cache, monkeypatch.context() as broken:
        broken.setattr(Gate, "restored", failing(MemoryError()))
        hook.told.clear()  # opening looks at the model, too
        run = cache.prefill(cache.tokens_of(PROMPT))
        assert (run.cached_tokens, hook.told) == (0, [None])
        assert int(mx.argmax(run.logits)) == wanted[0]


@pytest.mark.parametrize("directory", [True, False])
def test_a_hook_begins_anew_when_nothing_is_restored(tmp_path, directory):
    """Found by review: without a directory a loop of one's own went on from the prompt before."""
    with session_of(tmp_path / "cache" if directory else None, "llama", extras=(hook := Counter())) as cache:
        hook.told.clear()
        assert cache.restore([5, 6, 7] * 30) is None
        assert hook.told == [None]


def lazy_elsewhere() -> mx.array:
    """Something that another thread has yet to compute."""
    made = []
    thread = threading.Thread(target=lambda: made.append(mx.ones(3) * 2))
    thread.start()
    thread.join()
    return made[0]


BROKEN = {
    "fails": lambda: {}["nothing"],
    "gives nothing": lambda: None,
    "gives a list": lambda: Extras({"pending": [1.0]}),
    "gives an object": lambda: Extras({}, {"at": object()}),
    "gives no mapping of tensors": lambda: Extras([]),
    "gives no mapping of values": lambda: Extras({}, None),
    "names a tensor by a number": lambda: Extras({1: mx.zeros(3)}),
    "names a value by a number": lambda: Extras({}, {2: 1}),
    "gives no number": lambda: Extras({}, {"at": float("nan")}),
    "gives infinity": lambda: Extras({}, {"at": -math.inf}),
    "gives a very large integer": lambda: Extras({}, {"at": 10**300}),
    "gives a very long text": lambda: Extras({}, {"at": "a" * (1 << 20)}),
    "gives what only another thread can compute": lambda: Extras({"pending": lazy_elsewhere()}),
}


@pytest.mark.parametrize("capture", BROKEN.values(), ids=BROKEN)
def test_a_hook_that_fails_is_no_bug_of_kvstore(opened, wanted, caplog, capture):
    with opened(extras=(hook := Counter())) as cache:
        hook.capture = capture
        assert answered(cache) == wanted
        run = cache.prefill(cache.tokens_of(PROMPT))
        cache.publish(run.tokens, run.caches)
        assert cache.failures >= 2
        (line,) = caplog.records
        assert line.getMessage().startswith("kvstore: an answer goes on without the cache: the extras hook ")
        assert "bug" not in line.getMessage()
        assert ("KeyError" in caplog.text) == (capture is BROKEN["fails"]), "with where it failed"
        hook.capture = Extras
        assert answered(cache) == wanted
        assert cache.flush()
        assert cache.restore(run.tokens).tokens == len(run.tokens)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_hook_s_tensor_of_no_numbers_is_named(opened, wanted, caplog, number):
    """Found by review: it was told as the KV cache's."""
    with opened(extras=(hook := Counter())) as cache:
        hook.capture = lambda: Extras({"pending": mx.array([1.0, number])})
        assert answered(cache) == wanted
        assert cache.flush()
        said = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
        assert said == ["kvstore: NaN or infinity in the extras hook's tensor pending; not saved"]
        assert cache.restore(cache.tokens_of(PROMPT)) is None
        assert cache.failures == 0


BUGS = [*ERRORS, KeyError("a"), TypeError("a bug"), AttributeError("a bug")]


@pytest.mark.parametrize("error", BUGS, ids=lambda error: type(error).__name__)
def test_a_bug_is_not_told_as_a_mistake_of_the_caller(opened, monkeypatch, error):
    """Found by review: of some kinds it ended the caller's own loop."""
    with opened() as cache:
        run = cache.prefill(cache.tokens_of(PROMPT)[:200])
        with monkeypatch.context() as broken:
            broken.setattr(Recording, "_save", failing(error))
            cache.finish(run, run.tokens)
            cache.publish(run.tokens, run.caches)
        assert cache.failures == 2


def test_mistakes_are_told_whether_anything_is_left_to_be_saved_or_not(loaded, opened):
    """Found by review: where the store had the prompt already, or the prompt was too short, they were not."""
    tokens = loaded[1].encode(PROMPT)
    with opened() as cache:
        run, short = cache.prefill(tokens), cache.prefill(tokens[:12])
        assert short.recording is None
        caches, logits = run.caches, run.logits
        other = make_prompt_cache(loaded[0])
        for layer in other:
            layer.update_and_fetch(*mx.zeros((2, 1, 3, len(tokens), 5)))
        for _ in range(2):
            for mistake, words in (
                (lambda: cache.publish(tokens[:200], caches), "tokens where 200"),
                (lambda: cache.publish(tokens, caches[:-1]), "other cache classes"),
                (lambda: cache.publish(tokens, [object()] * len(caches)), "other cache classes"),
                (lambda: cache.publish(tokens, None), "no caches"),
                (lambda: cache.publish(tokens, other), "not Part"),
                (lambda: cache.publish(tokens, caches, logits=logits[:-1]), "logits are"),
                (lambda: cache.publish(tokens, caches, logits="some"), "logits"),
                (lambda: cache.finish(short, [*short.tokens, *range(500)]), "tokens where 512"),
                (lambda: cache.finish(run, [*tokens, 5]), "tokens where"),
                (lambda: cache.finish(run, [tokens[0] + 1, *tokens[1:]]), "the prompt of the run"),
            ):
                with pytest.raises(ValueError, match=words):
                    mistake()
            assert cache.flush()
        assert cache.failures == 0
        cache.finish(run, tokens)
        cache.publish(tokens, caches, logits=logits)


def test_what_a_loop_of_one_s_own_restores_and_saves_is_counted(loaded, opened, tmp_path):
    tokens = loaded[1].encode(PROMPT)
    with session_of(None, "llama") as nowhere:
        assert nowhere.restore(tokens) is None
    with opened() as cache:
        assert cache.restore(tokens) is None
        caches = make_prompt_cache(loaded[0])
        loaded[0](mx.array([tokens]), cache=caches)
        cache.publish(tokens, caches)
    with opened() as cache:
        assert cache.restore(tokens).tokens == len(tokens)
    with Store.open(tmp_path / "cache") as store:
        total = read_stats(store.context).total
    assert (total("requests"), total("prompt_tokens"), total("disk_tokens")) == (2, 2 * len(tokens), len(tokens))
    assert total("written_tokens") == len(tokens)
    assert total("written_bytes") >= total("read_bytes") > 0


def test_the_same_is_said_once_a_minute(caplog):
    """Found by review: what names a file or a number that is another one each time was said each time, and kept."""
    now = [0.0]
    guard = Guard(lambda: now[0])

    def read(number):
        return lambda: os.open(f"/nowhere/{number}", os.O_RDONLY)

    for number in range(50):
        assert not guard.done(read(number))
        assert not guard.done(failing(KeyError(number)))
    assert guard.tried(failing(OSError(24, "too many files")), otherwise=3) == 3
    assert (guard.failures, len(caplog.records)) == (101, 3)
    # What the store says of the system's errors is of one class, and comes from one line.
    for number in (errno.ENOSPC, errno.EIO) * 2:
        guard.done(unavailable_by(number))
    assert len(caplog.records) == 5
    now[0] = 61.0
    guard.done(read(99))
    assert len(caplog.records) == 6
    assert len(guard._said._said._said) == 1, "what is due again is forgotten"
