"""The cache directory for Python programs that generate with mlx-lm themselves.

    with kvstore_mlx.open("~/.cache/kv", model, tokenizer, path="mlx-community/…") as cache:
        for response in cache.stream_generate(prompt):
            print(response.text, end="")

or, for a loop of one's own, ``run = cache.prefill(tokens)``, decode with ``run.caches`` from ``run.logits``, and
``cache.finish(run, tokens)``; or ``cache.restore(tokens)`` and ``cache.publish(tokens, caches)`` and all else by hand.
Everything but the writing happens on the thread that calls, and what an event loop asks for on one of its own.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing, closing
from functools import partial
from types import TracebackType
from typing import Any, Self

import mlx.core as mx
from mlx_lm.generate import GenerationResponse
from mlx_lm.tokenizer_utils import TokenizerWrapper

from kvstore.keys import pack_tokens
from kvstore.store import Store
from kvstore_mlx.boundaries import MIN_TOKENS, Saving, boundaries
from kvstore_mlx.buffers import address_phase
from kvstore_mlx.fetching import Fetching
from kvstore_mlx.fingerprint import Quantization
from kvstore_mlx.forms import Form, ModelSpace
from kvstore_mlx.gate import Gate
from kvstore_mlx.generation import Run, answer, check_limit, tokens_of
from kvstore_mlx.guard import Guard
from kvstore_mlx.housekeeping import Housekeeping
from kvstore_mlx.live import ExtrasHook
from kvstore_mlx.metrics import Fetched, Metrics, Served
from kvstore_mlx.plan import Plan
from kvstore_mlx.prefill import pieces, prefill
from kvstore_mlx.recording import Recording
from kvstore_mlx.recordings import Recordings
from kvstore_mlx.restoring import Restored
from kvstore_mlx.turns import Taking, Turns
from kvstore_mlx.writer import Writer

__all__ = ["Session"]


class Session:
    """One model and one cache directory. Made by kvstore_mlx.open."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        plan: Plan,
        store: Store | None,
        space: ModelSpace | None,
        budget: int,
        step: int,
        interval: int,
        saving: Saving,
        quantization: Quantization | None,
        extras: ExtrasHook | None,
        write_limit: int | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._store = store
        self._plan = plan
        self._space = space
        self._stateful = plan.stateful or extras is not None
        self._step = step
        self._interval = interval
        self._saving = saving
        self._quantization = quantization
        self._extras = extras
        self._metrics: Metrics | None = None
        self._writer: Writer | None = None
        if store is not None:
            self._metrics = Metrics(store)
            self._let_go = partial(_let_go, self._metrics, store)
            self._writer = Writer(Housekeeping(store, budget, write_limit), afterwards=self._let_go)
            # For who drops it without close. Not at the interpreter's exit, which waits for no thread of this kind.
            self._dropped = weakref.finalize(self, self._writer.leave)
            self._dropped.atexit = False
        self._gate = None if space is None else Gate(space, saving.min_tokens)
        self._turns = Turns(model)
        self._guard = Guard()
        self._fetching = Fetching(space, self._writer, self._gate, saving, extras=extras is not None)
        phase = 0 if store is None else address_phase()
        self._recordings = Recordings(space, self._writer, self._gate, saving, extras, phase)

    @property
    def plan(self) -> Plan:
        """How this model's caches lie in the store."""
        return self._plan

    @property
    def stateful(self) -> bool:
        """Whether prefixes can be resumed at boundary states only."""
        return self._stateful

    @property
    def failures(self) -> int:
        """How often a step of the cache failed, and an answer went on without it; the log says why."""
        return self._guard.failures

    def restore(self, tokens: Sequence[int]) -> Restored | None:
        """Caches of the longest saved prefix, all of the tokens at most; None when nothing is saved.

        With logits when the prefix is all of the tokens and logits were saved after them. An extras hook is told what
        was restored, or to begin anew, without a directory too.
        """
        with self._turns.turn():
            restored = self._guard.tried(lambda: self._fetching.whole(tokens), None)
            self._guard.done(lambda: self._count(len(tokens), restored, None))
            if self._extras is not None:
                self._extras.restore(None if restored is None else restored.extras)
            return restored

    def prefill(self, tokens: Sequence[int], cuts: Sequence[int] = ()) -> Run:
        """Restore what is saved of a prompt, compute the rest, and save what is new in the background.

        The prefill is cut where states are saved, the same with and without a directory: at chunk borders, at cuts
        (where a stable part of the prompt ends, say), and before the last token. An exact hit needs no forward pass.
        """
        try:
            return self._turns.outcome(self._prefilling(list(tokens), cuts))
        finally:
            # Whether it will be finished nobody knows.
            if self._writer is not None:
                self._writer.prefilled()

    def _prefilling(self, tokens: list[int], cuts: Sequence[int]) -> Generator[None, None, Run]:
        """The steps of a prefill: the restore, and each piece."""
        started = time.perf_counter()
        if not tokens:
            raise ValueError("a prompt needs at least one token")
        nothing: tuple[Restored | None, dict[Form, int]] = None, {}
        restored, saved = self._guard.tried(lambda: self._fetching.fetch(tokens), nothing)
        if restored is not None and self._extras is not None:
            self._extras.restore(restored.extras)
        known = 0 if restored is None else restored.tokens
        ends = boundaries(len(tokens), self._interval, self._saving.every, cuts) if self._stateful else ()
        recording = self._guard.tried(lambda: self._recordings.begin(tokens, saved, known, ends), None)
        self._guard.done(lambda: self._count(len(tokens), restored, recording))
        caches = self._make() if restored is None else restored.caches
        logits = None if restored is None else restored.logits
        run = Run(tokens, caches, logits, known, 0 if restored is None else restored.size, recording)
        if known < len(tokens):
            parts = pieces(known, len(tokens), self._step, [*ends, *cuts, len(tokens) - 1])
            spent = 0.0
            for part in parts:
                yield
                if self._writer is not None:
                    # Each time: another answer of this session may have ended meanwhile.
                    self._writer.prefilling()
                begun = time.monotonic()
                run.logits = prefill(
                    self._model,
                    caches,
                    tokens,
                    [part],
                    after=lambda done: self._after(run, done),
                    quantization=self._quantization,
                )
                spent += time.monotonic() - begun
            if self._gate is not None:
                self._gate.prefilled(len(tokens) - known, spent)
        run.seconds = time.perf_counter() - started
        ended = run.recording
        if ended is not None and self._writer is not None and known < len(tokens) and len(tokens) >= MIN_TOKENS:
            self._writer.choosing()
            self._save(run, lambda: ended.finished(caches, len(tokens), tokens, logits=run.logits))
        return run

    def _save(self, run: Run, step: Callable[[], None]) -> None:
        """A step of saving. When it fails it was the last one of this answer."""
        if not self._guard.done(step):
            run.recording = None

    def _count(self, tokens: int, restored: Restored | None, recording: Recording | None) -> None:
        """Count a prompt for ``kvstore stats``, and have it told what is written of it."""
        if self._metrics is None:
            return
        if restored is None:
            fetched = Fetched(tokens)
        else:
            fetched = Fetched(tokens, restored.tokens, "disk", restored.size, restore_s=restored.seconds)
        wrote = self._metrics.fetched(fetched)
        if recording is not None:
            recording.on_written = wrote

    def finish(self, run: Run, tokens: Sequence[int], *, count: int | None = None) -> None:
        """Save what was generated. tokens are the prompt and all tokens that were forwarded after it; ValueError when
        they are not what the run's caches hold. count: see publish.
        """
        held = list(tokens)
        with self._turns.turn():
            if held[: len(run.tokens)] != run.tokens:
                raise ValueError("finish wants the prompt of the run, and what was forwarded after it")
            self._can_be_saved(held, run.caches, count=count)
            self._finish(run, held)
            self._idle()

    def _finish(self, run: Run, tokens: Sequence[int]) -> None:
        recording = run.recording
        if recording is not None:
            self._save(run, lambda: recording.finished(run.caches, len(tokens), tokens))

    def _idle(self) -> None:
        """Have the writer go at full speed, unless another answer makes itself known."""
        if self._writer is not None:
            self._writer.idle()

    def publish(
        self,
        tokens: Sequence[int],
        caches: Sequence[Any],
        *,
        logits: Any | None = None,
        decoded: bool = False,
        count: int | None = None,
    ) -> None:
        """Save caches that hold exactly these tokens; what is saved of them already is not written again.

        decoded: whether any of the tokens was generated rather than prefilled; an exact session leaves them all then.
        logits ``[vocabulary]`` are those after the last one, so that the next exact hit needs no forward pass.
        count: how many tokens the caches hold, as you counted them while you forwarded them. A model none of whose
        layers counts (mamba, rwkv7) must be told. ValueError when the caches or the logits are not this model's, or the
        caches hold another number of tokens, or nobody says how many.
        """
        held = list(tokens)

        def publish() -> None:
            recording = self._recordings.of(held, self._fetching.borders(held), decoded=decoded)
            if recording is not None and self._metrics is not None:
                recording.on_written = self._metrics.writing(Served())
                recording.finished(caches, len(held), held, logits=logits)

        with self._turns.turn():
            if self._can_be_saved(held, caches, logits, count):
                self._guard.done(publish)

    def _can_be_saved(
        self, tokens: list[int], caches: Sequence[Any], logits: Any | None = None, count: int | None = None
    ) -> bool:
        """Whether what a caller hands over can be: not without a directory, nor with images. A mistake is raised, also
        where nothing is left to be saved.
        """
        if self._space is None or self._guard.tried(lambda: pack_tokens(tokens), None) is None:
            return False
        self._space.check(caches, len(tokens), logits, count)
        return True

    def stream_generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 256,
        sampler: Callable[[Any], Any] | None = None,
        logits_processors: Sequence[Callable[[Any, Any], Any]] = (),
        cuts: Sequence[int] = (),
    ) -> Generator[GenerationResponse, None, None]:
        """As mlx_lm.stream_generate. Responses count the whole prompt, and do not say how much of it was
        reused; `prefill` does.

        max_tokens -1 is no limit, as there. An answer belongs to the thread that takes it. It ends when it is closed or
        forgotten, and what was generated is saved; if that is elsewhere, when its thread calls this session next.
        """
        taking = Taking()
        steps = self._steps(prompt, max_tokens, sampler, list(logits_processors), cuts, taking=taking)
        return self._turns.here(steps, taking)

    async def astream_generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 256,
        sampler: Callable[[Any], Any] | None = None,
        logits_processors: Sequence[Callable[[Any, Any], Any]] = (),
        cuts: Sequence[int] = (),
    ) -> AsyncGenerator[GenerationResponse, None]:
        """As stream_generate, while the event loop goes on: everything is computed on a thread that the session has.

        Several answers take turns there, a piece of a prefill or a token at a time. One that is cancelled or closed
        ends after the piece or token under way: what was saved of its prompt by then stays, and what was generated is
        saved. (To leave an ``async for`` early, say when by contextlib.aclosing.) Samplers, logits processors and
        extras hooks run on that thread, too, whose random numbers go on from those of the caller when an answer begins.
        A hook that keeps the state of one answer serves one at a time.
        """
        taking = Taking()
        steps = self._steps(prompt, max_tokens, sampler, list(logits_processors), cuts, taking=taking)
        async with aclosing(self._turns.apart(steps, taking)) as taken:
            async for step in taken:
                yield step

    def _steps(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        sampler: Callable[[Any], Any] | None,
        processors: Sequence[Callable[[Any, Any], Any]],
        cuts: Sequence[int],
        *,
        taking: Taking,
    ) -> Generator[GenerationResponse | None, None, None]:
        """The steps of an answer: None before each piece of its prefill, then its responses."""
        check_limit(max_tokens)
        generated = 0
        try:
            run = yield from self._prefilling(self.tokens_of(prompt), cuts)
            responses = answer(
                self._model,
                self._wrapped(),
                run,
                max_tokens,
                sampler=sampler,
                processors=processors,
                quantization=self._quantization,
                finish=lambda run, held: self._finish(run, held) if taking.now else None,
            )
            for response in responses:
                generated += 1
                if self._writer is not None:
                    self._writer.stepped()
                # Another thread may look at it, and could not compute it.
                mx.eval(response.logprobs)
                yield response
        finally:
            # However it ended: after one token, at a failure, or because its client went.
            if taking.now:
                self._idle()
                if self._metrics is not None:
                    self._metrics.generated(generated)

    def tokens_of(self, prompt: str | Sequence[int]) -> list[int]:
        """A prompt as mlx_lm.stream_generate tokenizes it."""
        return tokens_of(self._wrapped(), prompt)

    def generate(self, prompt: str | Sequence[int], **kwargs: Any) -> str:
        """The whole answer as text; arguments as stream_generate."""
        with closing(self.stream_generate(prompt, **kwargs)) as responses:
            return "".join(response.text for response in responses)

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until everything is written; False when timeout seconds were not enough."""
        self._turns.tidy()
        return self._writer is None or self._writer.drain(timeout)

    def close(self, timeout: float = 60.0) -> None:
        """Write what is queued, then let the directory go. What timeout seconds are not enough for is not saved, and a
        warning says so.

        Answers of an event loop that are under way end after their step, as if there were no more tokens. What is
        queued of a session that is dropped instead is written in the background, unless the process ends before.
        """
        self._turns.close()
        if self._writer is not None:
            self._writer.close(timeout)
            # Its thread does when it ends; but where it is not waited for any longer the process may end first.
            self._let_go()
            self._dropped.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wrapped(self) -> Any:
        if self._tokenizer is None:
            raise ValueError("kvstore_mlx.open was given no tokenizer")
        wrapped = isinstance(self._tokenizer, TokenizerWrapper)
        return self._tokenizer if wrapped else TokenizerWrapper(self._tokenizer)

    def _make(self) -> list[Any]:
        if self._extras is not None:
            self._extras.restore(None)
        return self._plan.make()

    def _after(self, run: Run, done: int) -> None:
        recording = run.recording
        if recording is None or done >= len(run.tokens):
            return
        self._save(run, lambda: recording.reached(run.caches, None, done) if recording.wants(done) else None)


def _let_go(metrics: Metrics, store: Store) -> None:
    """What is left to do with a directory when all is written."""
    metrics.close()
    store.close()
