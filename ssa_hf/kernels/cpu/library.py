"""Compiling, caching and loading the C++ kernel."""

import argparse
import ctypes
import functools
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils import cpp_extension

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_INSTRUCTION_SETS = {
    "AVX512": ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mavx2", "-mfma", "-mf16c"],
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
}
_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-shared", "-Wno-psabi"]
# Weights of masked keys rely on infinities, so no -ffast-math.
_FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fwrapv"]


class KernelUnavailable(RuntimeError):
    """The kernel can't be built or loaded on this machine."""


_lock = threading.Lock()


def load() -> ctypes.CDLL:
    """Return the compiled kernel, building it if this machine has not yet done so.

    Raises:
        KernelUnavailable: if there is no compiler, or it fails; the same again on every further call.
    """
    with _lock:
        result = _load_once()
    if isinstance(result, KernelUnavailable):
        raise result
    return result


@functools.cache
def _load_once() -> ctypes.CDLL | KernelUnavailable:
    try:
        return ctypes.CDLL(str(build()))
    except KernelUnavailable as error:
        return error
    except OSError as error:
        return KernelUnavailable(f"The SSA CPU kernel can't be loaded: {error}")


def build() -> Path:
    """Compile the kernel unless it is cached, and return the path of the shared library.

    The cache is the folder of PyTorch's own extensions (``TORCH_EXTENSIONS_DIR``). A library is written beside its
    place and then renamed, so that processes that build at once do not disturb each other.

    Raises:
        KernelUnavailable: if there is no compiler, or it fails.
    """
    compiler = cpp_extension.get_cxx_compiler()
    command = [compiler, *_flags(), str(_SOURCES / "attention.cpp")]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    command += [f"-L{path}" for path in cpp_extension.library_paths()] + ["-ltorch_cpu", "-lc10"]
    target = _cache_folder() / f"ssa_cpu_{_fingerprint(compiler)}.so"
    if target.is_file():
        return target
    logger.warning("Building the SSA CPU kernel with %s, once for this machine (some seconds) ...", compiler)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / target.name
            result = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True)
            if result.returncode:
                raise KernelUnavailable(f"Building the SSA CPU kernel failed:\n{result.stderr[-4000:]}")
            os.replace(built, target)
    except OSError as error:
        raise KernelUnavailable(f"Building the SSA CPU kernel failed: {error}") from error
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and load the kernel ("ssa-hf build"); return the exit status."""
    parser = argparse.ArgumentParser(
        prog="ssa-hf build", description="Compile the CPU kernel into PyTorch's cache of extensions."
    )
    parser.parse_args(arguments)
    try:
        path = build()
        load()
    except KernelUnavailable as error:
        print(f"ssa-hf build: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


def _flags() -> list[str]:
    openmp = [] if sys.platform == "darwin" else ["-fopenmp"]
    return [*_FLAGS, *openmp, *_INSTRUCTION_SETS.get(torch.backends.cpu.get_cpu_capability(), [])]


def _cache_folder() -> Path:
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(root) / "ssa_hf" if root else Path.home() / ".cache" / "torch_extensions" / "ssa_hf"


def _fingerprint(compiler: str) -> str:
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise KernelUnavailable(f"No C++ compiler ({compiler}): {error}") from error
    digest = hashlib.sha256(f"{_flags()} {torch.__version__} {version}".encode())
    for source in sorted((*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
