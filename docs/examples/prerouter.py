"""An engine with a prerouter: a head that predicts, at each token, which experts the next token will be sent to.

Experts can then be fetched one token ahead. The prediction that is pending and the experts that were last used are not
in any cache; without them the first token after a restore would be routed as if it were the first of a prompt. They are
attached to every boundary, and come back with it.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import llama

from kvstore_mlx.live import Extras

EXPERTS = 8
TOP = 2


class PreroutedModel(nn.Module):
    """A llama whose last hidden state goes through two of eight experts, chosen one token earlier."""

    def __init__(self, arguments: llama.ModelArgs) -> None:
        super().__init__()
        size = arguments.hidden_size
        self.base = llama.Model(arguments)
        self.gate = nn.Linear(size, EXPERTS, bias=False)
        self.prerouter = nn.Linear(size, EXPERTS, bias=False)
        self.experts = mx.random.normal((EXPERTS, size, size)) / size**0.5
        self.forget()

    def forget(self) -> None:
        """Begin a new prompt: nothing was predicted for its first token."""
        self._pending: mx.array | None = None
        self._last: mx.array | None = None

    @property
    def layers(self) -> list[Any]:
        """mlx-lm makes one cache for each."""
        layers: list[Any] = self.base.layers
        return layers

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """Logits ``[1, tokens, vocabulary]``; the prediction after the last token stays pending."""
        hidden = self.base.model(inputs, cache)
        predicted = self.prerouter(hidden)
        first = self.gate(hidden[:, :1]) if self._pending is None else self._pending[None, None]
        scores = mx.concatenate([first, predicted[:, :-1]], axis=1)
        if self._last is not None:
            # An expert that is already there is preferred a little.
            scores[:, 0] = scores[:, 0] + 0.1 * mx.any(mx.arange(EXPERTS)[:, None] == self._last, axis=-1)
        chosen = mx.argpartition(-scores, TOP - 1, axis=-1)[..., :TOP]
        weights = mx.softmax(mx.take_along_axis(scores, chosen, axis=-1), axis=-1)
        outputs = mx.einsum("bth,btkhd->btkd", hidden, self.experts[chosen])
        hidden = hidden + (outputs * weights[..., None]).sum(axis=2)
        self._pending, self._last = predicted[0, -1], chosen[0, -1]
        logits: mx.array = self.base.lm_head(hidden)
        return logits


class PrerouterExtras:
    """kvstore_mlx.live.ExtrasHook for a PreroutedModel."""

    name = "prerouter/1"

    def __init__(self, model: PreroutedModel) -> None:
        self._model = model

    def capture(self) -> Extras:
        """The pending prediction, and the experts of the last token."""
        pending, last = self._model._pending, self._model._last  # noqa: SLF001 - this engine's own
        assert pending is not None
        assert last is not None
        return Extras({"pending": pending, "last": last}, {"top": TOP})

    def restore(self, extras: Extras | None) -> None:
        """Go on from a boundary, or begin anew."""
        self._model.forget()
        if extras is not None and extras.tensors:
            if extras.values["top"] != TOP:
                raise ValueError("another number of experts a token")
            self._model._pending = extras.tensors["pending"]  # noqa: SLF001 - as above
            self._model._last = extras.tensors["last"]  # noqa: SLF001 - as above
