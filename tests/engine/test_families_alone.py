"""The families of test_families.py where a faster BLAS is preloaded: in a process of their own, with MLX's.

Bits are compared there, also of a prefix that ends within a piece of the prefill, and a BLAS that chooses its order of
summation by shape gives others (docs/exactness.md).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(1800)
def test_the_families_with_mlx_s_own_blas():
    if not os.environ.get("LD_PRELOAD"):
        pytest.skip("nothing is preloaded here: test_families.py ran by itself")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/engine/test_families.py"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
