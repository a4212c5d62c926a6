"""Copy one block from one cache directory to another; its digest is checked on the way.

Through memory, so that the bytes that were checked are the bytes that are written (copy_file_range would read them a
second time, and they may be others then), and never as a hard link: the two directories would share the block's times,
and so their grace clocks, and any damage to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from kvstore.commit import place_block
from kvstore.context import Context
from kvstore.errors import DamagedBlockError
from kvstore.fs import mostly_holes, preadv_full
from kvstore.manifest import BlockRef
from kvstore.staged import staged_file

__all__ = ["BUFFER_BYTES", "copy_block"]

BUFFER_BYTES = 4 << 20
"""Copied at a time: long enough for the disk, short enough to be hashed while it is hot."""


def copy_block(
    source: Context, target: Context, ref: BlockRef, buffer: memoryview | None, wrote: Callable[[int], None]
) -> bool:
    """Bring a block into the target; False when the source has none of that name. Without a buffer, only look.

    wrote is told the bytes as they are written. Raises DamagedBlockError, whose text names the file, when the source's
    block cannot be read or is not what ref says; and OSError when the target cannot be written.
    """
    path = source.layout.block(ref.digest)
    try:
        fd, status = source.fs.open_fd(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise DamagedBlockError(f"block {path} cannot be read: {error.strerror or error}") from error
    try:
        if status.st_size != ref.size:
            raise DamagedBlockError(f"block {path} is {status.st_size} bytes long, not {ref.size}")
        if mostly_holes(fd, status):
            raise DamagedBlockError(f"block {path} is mostly holes")
        if buffer is None:
            return True
        with staged_file(target, ref.size) as staged:
            for at in range(0, ref.size, buffer.nbytes):
                view = buffer[: ref.size - at]
                try:
                    preadv_full(fd, [view], at)
                except (OSError, EOFError) as error:
                    raise DamagedBlockError(f"block {path} cannot be read: {error}") from error
                staged.write([view])
                wrote(view.nbytes)
            if staged.digest() != ref.digest:
                raise DamagedBlockError(f"block {path} is damaged: its digest does not match its bytes")
    finally:
        os.close(fd)
    place_block(target, staged.path, ref)
    return True
