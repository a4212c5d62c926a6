"""Find a fast BLAS to preload under MLX on Linux.

MLX's Linux wheel brings the reference BLAS along, whose matrix product is more than ten times
slower than OpenBLAS; so is then the prefill of a prompt, which tests spend most of their time on.
MLX calls it through ordinary dynamic symbols, so a library in LD_PRELOAD that exports the same names takes
over without a change to MLX. As a command this prints the library to preload, or nothing.

Give the preload to the process that runs MLX, not to a whole shell: OpenBLAS starts its threads
in every process it is loaded into.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

VARIABLE = "KVSTORE_BLAS"
BUILD_DIR = Path(__file__).resolve().parent.parent / "build" / "blas"
# The agreement asked of a preloaded library: float32 sums in another order differ by far less.
TOLERANCE = 1e-3

# The only BLAS routines that libmlx.so imports. It imports LAPACK too, but no language model uses
# that, and the library in the wheel goes on serving it.
_SHIM_SOURCE = """\
#define GEMM(name, scalar, type)                                                              \\
    void scipy_cblas_##name(int, int, int, int, int, int, scalar, const type *, int,          \\
                            const type *, int, scalar, type *, int);                          \\
    void cblas_##name(int order, int ta, int tb, int m, int n, int k, scalar alpha,           \\
                      const type *a, int lda, const type *b, int ldb, scalar beta, type *c,   \\
                      int ldc) {                                                              \\
        scipy_cblas_##name(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);      \\
    }
GEMM(sgemm, float, float)
GEMM(dgemm, double, double)
GEMM(cgemm, const void *, void)
"""
_LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).cblas_sgemm"
_TIME = """\
import json, time
import mlx.core as mx, numpy as np
mx.set_default_device(mx.cpu)
rng = np.random.default_rng(0)
a, b = (rng.standard_normal((1024, 1024)).astype(np.float32) for _ in range(2))
x, y, times = mx.array(a), mx.array(b), []
for _ in range(3):
    start = time.perf_counter()
    z = x @ y
    mx.eval(z)
    times.append(time.perf_counter() - start)
wanted = a.astype(np.float64) @ b
error = float(np.abs(np.array(z) - wanted).max() / np.abs(wanted).max())
print(json.dumps({"seconds": min(times), "error": error}))
"""


def find(env: Mapping[str, str] | None = None, build_dir: Path = BUILD_DIR) -> Path | None:
    """The library to preload, or None where there is none or, as on macOS, no need of one.

    The order is: what KVSTORE_BLAS says ('none' for no library), the system's OpenBLAS, and the
    package scipy-openblas32 behind a shim that is compiled on first use.
    """
    if sys.platform != "linux":
        return None
    chosen = (os.environ if env is None else env).get(VARIABLE, "")
    if chosen.lower() == "none":
        return None
    if chosen:
        path = Path(chosen).expanduser().absolute()
        if _preloadable(path):
            return path
        print(f"fast_blas: {VARIABLE} names no library that can be preloaded: {chosen}", file=sys.stderr)
        return None
    return next(filter(_preloadable, _system_candidates()), None) or _packaged(build_dir)


def preload_env(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of the environment in which a child process gets the fast BLAS, if there is one."""
    result = dict(env)
    library = find(env)
    if library is not None:
        # The dynamic linker takes both as separators.
        present = result.get("LD_PRELOAD", "").replace(":", " ").split()
        if str(library) not in present:
            result["LD_PRELOAD"] = ":".join([str(library), *present])
    return result


def _preloadable(path: Path) -> bool:
    """Whether it is a library of this Python's own kind with a name that LD_PRELOAD can hold.

    A folder of libraries may hold those of another word size, and a library that does not fit
    would only be reported by the dynamic linker, once for every process.
    """
    if any(character in " :\t\n" for character in str(path)):
        return False
    kind = _elf_kind(path)
    return kind is not None and kind == _elf_kind(Path(sys.executable))


def _elf_kind(path: Path) -> bytes | None:
    """Word size, byte order and machine from an ELF header; None for any other file."""
    try:
        with path.open("rb") as file:
            header = file.read(20)
    except OSError:
        return None
    return header[4:6] + header[18:20] if header[:4] == b"\x7fELF" and len(header) == 20 else None


def _system_candidates() -> Iterator[Path]:
    """Where distributions keep OpenBLAS: the builds with threads first, 64-bit indices never."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or f"{platform.machine()}-linux-gnu"
    for root in (Path("/usr/lib"), Path("/usr/local/lib")):
        for folder in (root / multiarch, root.with_name("lib64"), root):
            for pattern in (
                "openblas-pthread/libopenblas.so*",
                "libopenblasp.so*",
                "openblas-openmp/libopenblas.so*",
                "libopenblas.so*",
            ):
                yield from sorted(folder.glob(pattern))


def _packaged(build_dir: Path) -> Path | None:
    """The shim in front of scipy-openblas32, compiled unless it is there; None if that fails.

    That package prefixes all its names, so that it cannot be preloaded itself. Any failure is
    silent: a slow BLAS is a state that works.
    """
    spec = importlib.util.find_spec("scipy_openblas32")
    folders = list(spec.submodule_search_locations or []) if spec else []
    libraries = sorted(path for folder in folders for path in Path(folder).glob("lib/libscipy_openblas*.so"))
    if not libraries:
        return None
    library = libraries[0].resolve()
    digest = hashlib.sha256(f"{library}\n{_SHIM_SOURCE}".encode()).hexdigest()[:12]
    shim = build_dir.absolute() / f"libkvstore_blas-{digest}.so"
    if not shim.exists():
        compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
        if compiler is None or not _compile(compiler, library, shim):
            return None
    return shim if _preloadable(shim) else None


def _compile(compiler: str, library: Path, shim: Path) -> bool:
    """Compile, try to load, and only then put in place: others may be looking for it already."""
    try:
        shim.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=shim.parent) as folder:
            source, made = Path(folder, "shim.c"), Path(folder, shim.name)
            source.write_text(_SHIM_SOURCE, encoding="ascii")
            command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(made), str(source), str(library)]
            command += ["-Xlinker", "-rpath", "-Xlinker", str(library.parent)]
            for step in (command, [sys.executable, "-c", _LOAD, str(made)]):
                subprocess.run(step, check=True, capture_output=True, timeout=60)
            made.replace(shim)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def measure(library: Path | None) -> tuple[float, float]:
    """Seconds of a 1024x1024x1024 float32 product in MLX, and its error relative to NumPy's."""
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    if library is not None:
        env["LD_PRELOAD"] = str(library)
    run = subprocess.run([sys.executable, "-c", _TIME], env=env, check=True, capture_output=True, text=True)
    result = json.loads(run.stdout)
    return result["seconds"], result["error"]


def _check(library: Path | None) -> int:
    """Print what the library gains; fail if MLX computes something else with it."""
    if library is None:
        print("no library to preload")
        return 0
    try:
        results = {"without": measure(None), "with": measure(library)}
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines() or ["no message"]
        print(f"fast_blas: MLX could not be timed: {lines[-1]}", file=sys.stderr)
        return 1
    print(library)
    for label, (seconds, error_size) in results.items():
        print(f"{label:>8}: {seconds * 1e3:8.1f} ms, relative error {error_size:.1e}")
    return 0 if results["with"][1] <= TOLERANCE else 1


def main(arguments: list[str] | None = None) -> int:
    """Run the command; finding nothing is no failure."""
    parser = argparse.ArgumentParser(description="Print the BLAS library to preload under MLX, if any.")
    parser.add_argument("--check", action="store_true", help="time MLX with and without it instead")
    options = parser.parse_args(arguments)
    library = find()
    if options.check:
        return _check(library)
    if library is not None:
        print(library)
    return 0


if __name__ == "__main__":
    sys.exit(main())
