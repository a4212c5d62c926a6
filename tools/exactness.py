"""How much the pieces of a prefill matter: the same prompt computed in other pieces, on this machine's kernels.

    make exactness            prints the tables for both of the linear algebra libraries that MLX's CPU backend may have
                              here, and puts them into docs/exactness.md

And how far off it would be to go on from caches that kvstore leaves out. Each model is tiny, float32, with random
weights. No figure of the page is typed by hand.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from families import build, rows
from family_arguments import POSITIONS
from family_runs import Answer, Quantized, forward, greedy, tokens_of
from page import markers, put

ROOT = Path(__file__).resolve().parent.parent
BLAS = "OpenBLAS" if "openblas" in os.environ.get("LD_PRELOAD", "").lower() else "reference BLAS"
MARKERS = markers(f"exactness {BLAS}")
LEFT_OUT = markers("exactness left out")

FAMILIES = (
    "llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_next", "qwen3_5_moe", "bailing_moe", "bailing_hybrid",
    "lfm2", "jamba", "falcon_h1", "mamba", "mamba2", "rwkv7", "deepseek_v3", "llama4",
)  # fmt: skip

PROMPT = 640
STEP = 256
TOKENS = 12


def ways(count: int) -> dict[str, list[int]]:
    """The lengths of pieces to compute a prompt in; the first is what the others are compared with."""
    steps = [STEP] * (count // STEP) + [count % STEP]
    return {
        f"steps of {STEP}": steps,
        "in one piece": [count],
        "cut at 512 more": [256, 256, *([count - 512] if count > 512 else [])],
        "cut at 300": [256, 44, 256, count - 556],
        "cut at 301": [256, 45, 256, count - 557],
        "last 64 decoded": [*([STEP] * ((count - 64) // STEP)), (count - 64) % STEP, *([1] * 64)],
    }


def run(model: Any, tokens: Sequence[int], lengths: Sequence[int]) -> Answer:
    """Greedy tokens after a prefill in these pieces."""
    caches = make_prompt_cache(model)
    at, logits = 0, None
    for length in lengths:
        if length:
            logits = forward(model, caches, tokens[at : at + length])
            at += length
    if at != len(tokens):
        raise AssertionError(f"pieces of {at} tokens for a prompt of {len(tokens)}")
    return greedy(model, caches, logits, TOKENS)


def measured(row: str) -> dict[str, tuple[float, bool]]:
    """For each other way: the largest difference of a first logit over the largest, and if tokens are the same."""
    model = build(row)
    tokens = tokens_of(7, PROMPT)
    answers = {name: run(model, tokens, lengths) for name, lengths in ways(PROMPT).items()}
    first, *others = answers
    wanted = answers[first]
    scale = float(np.nanmax(np.abs(np.where(np.isfinite(wanted.logits[0]), wanted.logits[0], np.nan))))
    found = {}
    for name in others:
        with np.errstate(invalid="ignore"):
            difference = float(np.nanmax(np.abs(answers[name].logits[0] - wanted.logits[0])))
        found[name] = difference / scale, answers[name].tokens == wanted.tokens
    return found


def left_out() -> Iterator[tuple[str, float]]:
    """What kvstore does not go on from, with how far off the next logits would be, as a part of the largest."""
    llama, tokens, others = build("llama"), tokens_of(7, 2 * POSITIONS), tokens_of(8, 20)
    for bits in (4, 8):
        ours, theirs = (_after(llama, tokens[:260], step, (bits, 32)) for step in (32, STEP))
        text = f"260 tokens with `--kv-bits {bits}`, in steps of 32 where the run has steps of {STEP}"
        yield text, _far(ours, theirs)
    plain = _after(llama, [*tokens[:80], *others], 80)
    quantized = _cut(llama, tokens[:260], 80, others, (8, 32))
    text = "260 tokens with `--kv-bits 8`, cut to 80 and gone on quantized, where the run is not yet"
    yield text, _far(quantized, plain)
    dynamic = build("internlm3, dynamic")
    kept = POSITIONS - 20
    whole = _after(dynamic, [*tokens[:kept], *others], kept)
    text = f"{len(tokens)} tokens in one piece with a dynamic rope whose limit is {POSITIONS}, cut to {kept}"
    yield text, _far(_cut(dynamic, tokens, kept, others), whole)


def _after(model: Any, tokens: Sequence[int], step: int, quantized: Quantized = None) -> Any:
    """The logits after tokens in steps."""
    caches, logits = make_prompt_cache(model), None
    for first in range(0, len(tokens), step):
        logits = forward(model, caches, tokens[first : first + step], quantized)
    return logits


def _cut(model: Any, tokens: Sequence[int], kept: int, others: Sequence[int], quantized: Quantized = None) -> Any:
    """The logits after some others that follow the first tokens of a piece, as mlx-lm cuts its caches to these."""
    caches = make_prompt_cache(model)
    forward(model, caches, tokens, quantized)
    trim_prompt_cache(caches, len(tokens) - kept)
    return forward(model, caches, others, quantized)


def _far(ours: Any, theirs: Any) -> float:
    wanted = np.array(theirs)
    return float(np.abs(np.array(ours) - wanted).max() / np.abs(wanted).max())


def left_out_table() -> Iterator[str]:
    """The rows of a Markdown table, and the line of its conditions."""
    yield "| what is not gone on from | the next logits |"
    yield "|---|---|"
    for what, far in left_out():
        yield f"| {what} | {100 * far:.{0 if far > 0.1 else 1}f} % |"
    yield ""
    yield (
        "The largest difference from those of a run that never stopped, over the largest logit: of llama, and for the "
        "rope of internlm3, as small as the above, with a prompt of random tokens. `make exactness` prints this, too."
    )


def table(families: Sequence[str]) -> Iterator[str]:
    """The rows of a Markdown table, and the line of its conditions."""
    _, *names = ways(PROMPT)
    yield f"| family | {' | '.join(names)} |"
    yield f"|---{'|---' * len(names)}|"
    for row in families:
        cells = []
        for difference, same in measured(row).values():
            size = f"{difference:.0e}" if difference else "same bits"
            cells.append(size if same else f"{size}, **other tokens**")
        yield f"| {row} | {' | '.join(cells)} |"
        mx.clear_cache()
    yield ""
    yield (
        f"One prompt of {PROMPT} random tokens a family (n = 1: nothing in it is random or timed), compared with steps "
        f"of {STEP}: the largest difference of a logit of the first token over the largest logit, and whether {TOKENS} "
        f"greedy tokens are the same. Tiny models, float32, MLX's CPU backend with {BLAS}; mlx {version('mlx')}, "
        f"mlx-lm {version('mlx-lm')}. "
        "`make exactness` prints this table for your machine."
    )


def main() -> int:
    """Measure, print, and rewrite the page's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES, help=f"rows of make models (default: {len(FAMILIES)})")
    parser.add_argument("--page", type=Path, help="the page to write the table into")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.families) - set(rows())):
        print(f"there is no family {unknown[0]}; make models lists them", file=sys.stderr)
        return 1
    for block, made in ((MARKERS, table(arguments.families)), (LEFT_OUT, left_out_table())):
        lines = []
        for line in made:
            print(line, flush=True)
            lines.append(line)
        if arguments.page is not None and not put(arguments.page, block, "\n".join(lines) + "\n"):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
