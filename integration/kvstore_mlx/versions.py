"""Which mlx and mlx-lm releases the adapter knows.

The adapter reaches into cache classes and the server's generation loop, which have changed between minor releases (the
``state`` of KVCache did in 0.32.2). A release it was not tested with is refused with a sentence rather than trusted.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from kvstore.errors import KVStoreError

__all__ = ["SUPPORTED", "UnsupportedVersionError", "check_versions"]

SUPPORTED = {"mlx": ((0, 32, 4), (0, 33)), "mlx-lm": ((0, 32, 2), (0, 33))}
"""Package: (first release that works, first release that was not tested)."""


class UnsupportedVersionError(KVStoreError):
    """An engine release that this adapter was not made for."""


def check_versions() -> dict[str, str]:
    """Installed versions by package; raises UnsupportedVersionError with the pip command that helps."""
    found = {}
    for package, (lowest, above) in SUPPORTED.items():
        wanted = f"{package}>={_text(lowest)},<{_text(above)}"
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            raise UnsupportedVersionError(
                f"{package} is not installed; install it with: pip install 'kvstore-llm[mlx]'"
            ) from None
        if not lowest <= _numbers(found[package]) < above:
            raise UnsupportedVersionError(
                f"{package} {found[package]} is installed, and --kv-cache-dir was made for {_text(lowest)} or newer "
                f"below {_text(above)}; run: pip install '{wanted}'"
            )
    return found


def _numbers(text: str) -> tuple[int, ...]:
    """Leading numbers of a version, enough to compare with a range: 0.32.2.dev1 counts as 0.32.2."""
    numbers = []
    for part in text.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
