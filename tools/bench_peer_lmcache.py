"""LMCache's local disk backend, for `bench peers`: python bench_peer_lmcache.py JSON.

It imports nothing of this project, because LMCache may live in an environment of its own (it needs versions of its own
of PyTorch and much else). Saving and loading happen in one process: the backend's index is in memory, and a new process
finds nothing of what an earlier one wrote. Chunks have LMCache's own size and layout, 256 tokens of
``[2, layers, tokens, heads * dim]``; the copies between them and the engine's tensors are part of both times, as with
every peer.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

_CHUNK = 256
_WAIT_S = 120.0


def main() -> None:
    """Save step by step, load all, compare, and print what it took."""
    job = json.loads(sys.argv[1])
    import torch  # noqa: PLC0415 - a heavy package of another environment

    shape = job["shape"]
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[shape["dtype"]]
    width, layers, tokens, step = shape["heads"] * shape["dim"], shape["layers"], job["tokens"], job["step"]
    engine = torch.randint(-100, 100, (2, layers, tokens, width), dtype=torch.int16).to(dtype)
    disk, memory, loop = _backend(job, dtype, (2, layers, _CHUNK, width))
    keys = [_key(at, dtype) for at in range(tokens // _CHUNK)]

    before, reset = _field("io", r"^wchar: (\d+)$"), _peak_from_here()
    started = time.perf_counter()
    for end in range(step, tokens + 1, step):
        for at in range((end - step) // _CHUNK, end // _CHUNK):
            chunk = memory.allocate(torch.Size((2, layers, _CHUNK, width)), dtype)
            chunk.tensor.copy_(engine[:, :, at * _CHUNK : (at + 1) * _CHUNK])
            disk.submit_put_task(keys[at], chunk)
            chunk.ref_count_down()
        _wait(disk, keys[: end // _CHUNK])
    saved = time.perf_counter() - started
    save_extra = _field("status", r"^VmHWM:\s+(\d+) kB") * 1024 - reset
    written = _field("io", r"^wchar: (\d+)$") - before

    reset = _peak_from_here()
    started = time.perf_counter()
    back = torch.empty_like(engine)
    for at, chunk in enumerate(disk.batched_get_blocking(keys)):
        back[:, :, at * _CHUNK : (at + 1) * _CHUNK].copy_(chunk.tensor)
        chunk.ref_count_down()
    loaded = time.perf_counter() - started
    load_extra = _field("status", r"^VmHWM:\s+(\d+) kB") * 1024 - reset - back.nbytes
    if not torch.equal(engine, back):
        raise AssertionError("what was loaded is not what was saved")
    result = {
        "save": saved,
        "save_extra": save_extra,
        "written": written,
        "load": loaded,
        "load_extra": load_extra,
    }
    print(json.dumps(result), flush=True)
    loop.call_soon_threadsafe(loop.stop)


def _backend(job: dict[str, Any], dtype: Any, chunk: tuple[int, ...]) -> tuple[Any, Any, asyncio.AbstractEventLoop]:
    """The disk backend, the memory that it stages in, and the loop that its writes run on."""
    from lmcache.v1.config import LMCacheEngineConfig  # noqa: PLC0415
    from lmcache.v1.metadata import LMCacheMetadata  # noqa: PLC0415
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend  # noqa: PLC0415
    from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend  # noqa: PLC0415

    shape = job["shape"]
    size = job["tokens"] * shape["layers"] * 2 * chunk[-1] * dtype.itemsize
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=_CHUNK,
        local_cpu=False,
        max_local_cpu_size=size / 2**30 * 1.25 + 0.25,
        local_disk=f"file://{job['folder']}/",
        max_local_disk_size=size / 2**30 * 2 + 1,
    )
    metadata = LMCacheMetadata("bench", 1, 1, 0, 0, dtype, (shape["layers"], 2, _CHUNK, shape["heads"], shape["dim"]))
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    memory = LocalCPUBackend(config, metadata, "cpu")
    return LocalDiskBackend(config, loop, memory, "cpu", metadata=metadata), memory, loop


def _key(at: int, dtype: Any) -> Any:
    from lmcache.utils import CacheEngineKey  # noqa: PLC0415

    return CacheEngineKey("bench", 1, 0, at + 1, dtype)


def _wait(disk: Any, keys: list[Any]) -> None:
    """Until all keys are on disk: as the others' saves, one ends when its bytes have left the process."""
    deadline = time.monotonic() + _WAIT_S
    while not all(disk.contains(key) for key in keys):
        if time.monotonic() > deadline:
            raise AssertionError("a chunk was not written")
        time.sleep(0.0005)


def _peak_from_here() -> int:
    """Resident bytes now, with the earlier peak forgotten (Linux)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _field("status", r"^VmRSS:\s+(\d+) kB") * 1024


def _field(name: str, pattern: str) -> int:
    found = re.search(pattern, Path(f"/proc/self/{name}").read_text(encoding="ascii"), re.MULTILINE)
    return int(found[1]) if found else 0


if __name__ == "__main__":
    main()
