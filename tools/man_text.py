"""Text as roff, and the sections of kvstore's man page that no option says."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["ROOT_SECTIONS", "TAIL_SECTIONS", "literal", "paragraphs", "roff", "tagged"]

_SPECIAL = {"\\": r"\(rs", "-": r"\-", "'": r"\(aq", "`": r"\(ga", "~": r"\(ti", "^": r"\(ha", '"': r"\(dq"}
"""What roff would obey, or set as another character than the one that can be copied into a shell."""


def roff(text: str) -> str:
    """Text in which roff obeys nothing, in ASCII."""
    return "".join(_SPECIAL.get(char, char if char.isascii() else rf"\[u{ord(char):04X}]") for char in text)


def literal(text: str) -> str:
    """What is typed as it stands."""
    return rf"\fB{roff(text)}\fR"


def paragraphs(text: str) -> Iterator[str]:
    """Text with `literals` as paragraphs."""
    for each in re.split(r"\n\s*\n", text.strip()):
        yield ".PP"
        yield _line(each)


def tagged(tag: str, text: str) -> Iterator[str]:
    """What is explained (roff), and what is said of it."""
    yield ".TP"
    yield tag
    yield _line(text)


def _line(text: str) -> str:
    """One line of input: an empty one would be a gap, and one that begins with a dot or a quote a request."""
    parts = re.split(r"`([^`]+)`", " ".join(text.split()))
    joined = "".join(literal(part) if number % 2 else roff(part) for number, part in enumerate(parts))
    return rf"\&{joined}" if joined.startswith(".") else joined


def _example(*lines: str) -> Iterator[str]:
    yield from (".PP", ".RS 4", ".EX", *(roff(line) for line in lines), ".EE", ".RE")


ROOT_SECTIONS = [
    ".SH NAME",
    r"kvstore \- a persistent KV cache for LLM engines that is nothing but files",
    ".SH SYNOPSIS",
    ".PP",
    r"\fBkvstore\fR \fIcommand\fR [\fIoptions\fR] [\fIarguments\fR]",
    ".br",
    r"\fBkvstore\fR \fB\-\-version\fR | \fB\-\-help\fR",
    ".SH DESCRIPTION",
    *paragraphs(
        "An engine that keeps the attention keys and values of its prompts in a cache directory restores the longest "
        "saved prefix after a restart, and computes only the rest. The directory is plain files: it can be copied, "
        "rsynced, merged, and shared by several servers while in use.\n\n"
        "`kvstore serve` runs mlx-lm's server with such a directory; the other commands look at one, keep it within "
        "limits, check it, and bring directories together. All of them may run beside servers that use it. Each "
        "answers a mistake with one sentence.\n\n"
        "`kvstore` `--install-completion` adds completion to your shell; `--show-completion` prints the script."
    ),
]

_ENVIRONMENT = {
    "KVSTORE_DIR": "The cache directory where none is named. A server keeps one only with `--kv-cache-dir`.",
    "KVSTORE_SALT": "The salt where neither `--kv-cache-salt` nor `--kv-cache-salt-file` is given.",
    "KVSTORE_SAFE_BUFFERS": "1: restore by copies, whatever `kvstore doctor` found out about MLX's memory.",
    "NO_COLOR": "When set, nothing is coloured.",
}

_EXIT = {
    "0": "done",
    "1": "it could not be done; a sentence on stderr says why",
    "2": "the command line is wrong",
    "3": "of `doctor`: it works, and warnings say what speaks against it",
    "130": "interrupted",
}

TAIL_SECTIONS = [
    ".SH ENVIRONMENT",
    *(line for name, text in _ENVIRONMENT.items() for line in tagged(literal(name), text)),
    ".SH FILES",
    *tagged(rf"\fI{roff('~/.cache/kvstore/kv')}\fR", "The default cache directory."),
    *tagged(rf"\fI{roff('~/Library/Caches/kvstore/kv')}\fR", "The same on macOS."),
    *paragraphs(
        "KV is as sensitive as the prompt it came from: folders have mode 0700 and files 0600 unless the directory was "
        "made with `--kv-cache-shared`."
    ),
    ".SH EXIT STATUS",
    *(line for code, text in _EXIT.items() for line in tagged(literal(code), f"{text}.")),
    *paragraphs("`kvstore fsck` has the codes of fsck(8), which its section lists."),
    ".SH EXAMPLES",
    *paragraphs("Serve a model, and keep what it computes:"),
    *_example("kvstore serve --model mlx-community/Qwen3-8B-4bit --kv-cache-dir ~/.cache/kv"),
    *paragraphs("What is saved there, and why a prompt was not found:"),
    *_example("kvstore ls --tree ~/.cache/kv", "kvstore why ~/.cache/kv --prompt request.json --model path/to/model"),
    *paragraphs("Give room back, and check every byte of the rest:"),
    *_example("kvstore gc ~/.cache/kv --size 10GiB", "kvstore fsck ~/.cache/kv --read-data"),
    ".SH SEE ALSO",
    *paragraphs("fsck(8), rsync(1)"),
]
