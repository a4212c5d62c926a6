"""What of one request is still to be saved, and when it is copied out of the engine.

A recording follows one prompt from its lookup to the end of its generation. It knows up to which token the store has
the prompt (or will, from what is queued), and at each boundary copies only what is new: full chunks while a long prompt
is being prefilled, the rest of the prompt when the first token is out, the generated tokens at the end. For models that
need one it copies the boundary state as well, at the moment when the caches hold exactly that many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvstore.blocks import Span
from kvstore.keys import TOKEN_BYTES, pack_tokens
from kvstore.states import State
from kvstore_mlx.boundaries import MIN_TOKENS
from kvstore_mlx.forms import Form, ModelSpace
from kvstore_mlx.jobs import Boundary, Job
from kvstore_mlx.live import Extras, Live, Rows, captured
from kvstore_mlx.pool import Loan
from kvstore_mlx.refusals import Fate
from kvstore_mlx.writer import Writer

__all__ = ["Recording"]

MAX_HELD_BYTES = 1 << 28
"""States that all recordings of a writer keep, each beside its last one, until the queue has room. One can be tens of
megabytes."""


class Recording:
    """One request's way into the store.

    Each step of the engine is told with the caches it left: those of one sequence, or of a batch and the sequence's
    index in it; exactly is the number of tokens they must hold in every layer (None: see Live).

    saved: for each form of the model's caches, tokens of the prompt that blocks in the store hold already; nothing is
    saved of a form that is not in it, because writing it had failed when the prompt was looked up. known:
    tokens whose KV was not made by this request's prefill (they came from memory or disk). boundaries: where states are
    wanted. decoded: whether what is known may have been decoded. prompt_end: tokens that the prefill computes (all but
    one when None). prefill_only: save nothing that was decoded, nor what was computed upon it: a later prefill of the
    same tokens finds their place taken otherwise. extras: what the engine attaches to a boundary at the moment of the
    call.
    """

    def __init__(
        self,
        space: ModelSpace,
        writer: Writer,
        prompt: Iterable[int],
        *,
        saved: Mapping[Form, int],
        known: int,
        decoded: bool,
        boundaries: Sequence[int] = (),
        prompt_end: int | None = None,
        prefill_only: bool = False,
        extras: Callable[[], Extras] | None = None,
        phase: int = 0,
    ) -> None:
        self._space = space
        self._writer = writer
        self._phase = phase
        self._tokens = list(prompt)
        self._packed: bytes | None = None
        self._prompt_end = len(self._tokens) - 1 if prompt_end is None else prompt_end
        self._extras = extras
        self._known = known
        self._decoded = decoded
        self._prefill_only = prefill_only
        self._saved = dict(saved)
        self._boundaries = {end for end in boundaries if end > known}
        self._held: dict[int, tuple[Form, State]] = {}
        self._over = prefill_only and decoded
        # Jobs know no more of a recording than this: what it holds goes with it, whatever is still queued.
        self._fate = Fate()
        self.on_written: Callable[[int, int, float], None] | None = None
        self._prompt_due = any(self._prompt_end > end for end in self._saved.values()) or bool(self._boundaries)

    @property
    def prompt(self) -> list[int]:
        """The whole prompt, what was reused of it too."""
        return self._tokens

    @property
    def prompt_end(self) -> int:
        """Tokens of the prompt that a prefill computed, once the first token is out."""
        return self._prompt_end

    @property
    def known(self) -> int:
        """Tokens of the prompt that were not computed for this request."""
        return self._known

    @property
    def boundaries(self) -> list[int]:
        """Token counts at which the engine should stop for a state."""
        return sorted(self._boundaries)

    @property
    def _failed(self) -> bool:
        """Whether nothing more is saved, because it would be refused, or because the store lacks what this recording
        believes saved. The next request's lookup tells.
        """
        return self._over or self._fate.broken

    @property
    def prompt_due(self) -> bool:
        """Whether first_token still has something to do."""
        return self._prompt_due and not self._failed

    def prepare(self) -> None:
        """Called when a prefill begins: the memory for its first copy is made ready while it is computed."""
        form = next((form for form in reversed(self._saved) if form.least <= len(self._tokens)), None)
        if form is None or self._failed:
            return
        first = self._saved[form]
        end = min((first // form.interval + 1) * form.interval, self._prompt_end)
        if end > first and end >= MIN_TOKENS:
            self._writer.prepare(form, self._until(end), form.plan.token_bytes * (end - first))

    def wants(self, done: int) -> bool:
        """Whether there is anything to save when done tokens are computed; cheap, asked after every step."""
        if self._failed:
            return False
        return done in self._boundaries or any(
            done // form.interval * form.interval > end for form, end in self._saved.items()
        )

    def reached(self, caches: Sequence[Any], index: int | None, exactly: int) -> None:
        """Called after a step of the prefill that wants saving: saves full chunks, and everything at a boundary."""
        self._writer.prefilling()
        form, live = self._space.look(caches, index, exactly)
        end = exactly // form.interval * form.interval
        if exactly in self._boundaries:
            self._boundaries.discard(exactly)
            if form.stateful and form in self._saved:
                self._held[exactly] = form, self._state(live, decode=self._decoded)
                # The end of the prompt waits for the first token; its state cannot.
                end = exactly if exactly < self._prompt_end else end
        self._save(form, live, end)

    def first_token(self, caches: Sequence[Any], index: int | None, exactly: int | None) -> None:
        """Called when the first token is out, so that saving the rest of the prompt does not delay it."""
        if self._prompt_due:
            self._prompt_due = False
            form, live = self._space.look(caches, index, exactly)
            self._save(form, live, min(live.count, self._prompt_end))

    def finished(
        self,
        caches: Sequence[Any],
        exactly: int | None,
        tokens: Iterable[int],
        *,
        logits: Any | None = None,
    ) -> None:
        """Called at the end of generation with every token that was generated; saves those that were forwarded.

        logits are those after the last of them.
        """
        self._tokens, self._packed = list(tokens), None
        self.first_token(caches, None, exactly)
        form, live = self._space.look(caches, None, exactly)
        end = min(live.count, len(self._tokens))
        if form not in self._saved or (self._prefill_only and end > self._prompt_end):
            return
        if (form.stateful or logits is not None) and end == live.count and end > self._known and not self._failed:
            decode = self._decoded or end > self._prompt_end
            self._held[end] = form, self._state(live, decode=decode, logits=logits)
        self._save(form, live, end)

    def _state(self, live: Live, *, decode: bool, logits: Any | None = None) -> State:
        extras = None if self._extras is None else captured(self._extras)
        return live.state(decode=decode, phase=self._phase, logits=logits, extras=extras)

    def _save(self, form: Form, live: Live, end: int) -> None:
        """Queue tokens up to end that are not saved yet, and states; a full queue leaves them for the next time."""
        states = {at: state for at, (of, state) in self._held.items() if of is form and MIN_TOKENS <= at <= end}
        first = self._saved.get(form)
        if self._failed:
            self._let_go()
            return
        if first is None or end < MIN_TOKENS or (end <= first and not states):
            return
        if form.most is not None and live.count > form.most:
            self._let_go()
            return
        spans, loans = self._copied(form, live.rows, self._cuts(form, first, end, states), states)
        end = spans[-1].end if spans else min(first, end)
        ready = {at: state for at, state in states.items() if at <= max(first, end)}
        items: list[Span | Boundary] = [*spans, *(Boundary(at, state) for at, state in ready.items())]
        items.sort(key=lambda item: (item.end, isinstance(item, Boundary)))
        if items:
            last = max(item.end for item in items)
            job = Job(form, self._until(last), items, loans, self.on_written, self._fate)
            if self._writer.offer(job):
                self._saved[form] = max(first, end)
                for at in ready:
                    del self._held[at]
        self._let_go()

    def _let_go(self) -> None:
        """Of the states that a full queue left keep the last one, and of those before it what there is room for."""
        if self._failed:
            self._held.clear()
        older = sorted(self._held, reverse=True)[1:]
        sizes = [Boundary(at, self._held[at][1]).payload_bytes for at in older]
        for at in older[self._writer.held.keep(self, sizes, MAX_HELD_BYTES) :]:
            del self._held[at]

    def _until(self, end: int) -> bytes:
        """The first end tokens, packed."""
        if self._packed is None:
            # Once, and not at every chunk: a long prompt takes a millisecond.
            self._packed = pack_tokens(self._tokens)
        return self._packed[: end * TOKEN_BYTES]

    def _copied(
        self, form: Form, rows: Rows, cuts: Iterable[tuple[int, int]], states: Mapping[int, State]
    ) -> tuple[list[Span], dict[int, Loan]]:
        """Spans with copies of rows in memory of the writer's, as many as are wanted and as its queue has room for,
        beside the states that go along.
        """
        spans: list[Span] = []
        loans: dict[int, Loan] = {}
        room = self._writer.room
        beside = sorted((at, Boundary(at, state).payload_bytes) for at, state in states.items())
        for begin, end in cuts:
            data: list[Any] = []
            size = sum(spec.span_bytes(end - begin) for spec in rows.specs)
            if self._writer.refuses(form, self._until(end), size, self._fate):
                self._over = True
                break
            room -= size
            if sum(state for at, state in beside if at <= end) > room:
                break
            if rows.specs:
                loan = self._writer.lend(size)
                if loan is None:
                    break
                loans[begin] = loan
                data = rows.copy(begin, end, loan)
            # What another request computed may have been decoded; only this prefill is known to be one.
            decode = (self._decoded and begin < self._known) or end > self._prompt_end
            spans.append(Span(begin, end - begin, rows.specs, data, decode, self._phase))
        return spans, loans

    def _cuts(self, form: Form, first: int, end: int, states: Iterable[int]) -> Iterable[tuple[int, int]]:
        """The spans between two tokens: cut at chunk borders and states, and where decoded tokens begin or end."""
        inner = sorted({self._known, self._prompt_end, *states})
        while first < end:
            border = min((first // form.interval + 1) * form.interval, end)
            border = next((cut for cut in inner if first < cut < border), border)
            yield first, border
            first = border
