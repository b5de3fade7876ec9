"""Compiles the kernels on first use into the user's cache folder, and says why when it cannot.

Nothing needs the kernels: without a compiler, or with `KVATLAS_NATIVE=0`, plain PyTorch does the same work.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch  # also loads the OpenMP runtime that the library is linked to

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-w")
COMPILERS = ("g++", "c++", "clang++")
NEEDED = ("avx2", "f16c", "fma")


@dataclass(frozen=True, slots=True)
class Built:
    """The loaded library, or the reason there is none."""

    library: ctypes.CDLL | None = None
    why: str = ""


def cache_folder() -> Path:
    """Where compiled libraries are kept: `$KVATLAS_CACHE`, `$XDG_CACHE_HOME/kvatlas` or `~/.cache/kvatlas`."""
    if own := os.environ.get("KVATLAS_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvatlas"


@functools.cache
def compiler() -> str | None:
    """The C++ compiler to use: `$CXX` if set, else the first of g++, c++, clang++ that is installed."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), *COMPILERS))), None)


@functools.cache
def cpu_flags() -> str:
    """The processor's instruction sets as Linux lists them, or nothing where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")


def openmp_runtime() -> str | None:
    """Path of the OpenMP library that torch has loaded; linking to any other would start a second pool of threads."""
    try:
        paths = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
        found = {path for path in paths if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}
    except OSError:
        return None
    own = str(Path(torch.__file__).parent)  # another package may have brought one too
    return min(found, key=lambda path: (not path.startswith(own), path), default=None)


def obstacle() -> str:
    """Why the kernels cannot be built here, in one line; empty when nothing speaks against it."""
    if os.environ.get("KVATLAS_NATIVE") == "0":
        return "turned off by KVATLAS_NATIVE=0"
    if platform.machine() not in ("x86_64", "AMD64") or not all(flag in cpu_flags().split() for flag in NEEDED):
        return "they need Linux on an x86 CPU with AVX2"
    if compiler() is None:
        return "no C++ compiler was found (install g++ or clang++, or set CXX)"
    if openmp_runtime() is None:
        return "this build of PyTorch has no OpenMP threads to share"
    return ""


def target(flags: tuple[str, ...]) -> Path:
    """The library's file: its name changes with the sources, the flags, the compiler, the CPU and the runtime."""
    digest = hashlib.sha256()
    for source in sorted([*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    version = subprocess.run([str(compiler()), "--version"], capture_output=True, text=True, timeout=30).stdout
    for part in (*flags, str(compiler()), version, cpu_flags(), str(openmp_runtime())):
        digest.update(part.encode() + b"\0")
    return cache_folder() / f"native-{digest.hexdigest()[:20]}.so"


def compile_to(path: Path, flags: tuple[str, ...]) -> None:
    """Compile to `path`. Written elsewhere first and renamed, so that other processes see all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as folder:
        made = Path(folder) / path.name
        command = [str(compiler()), *flags, str(FOLDER / "kernel.cpp"), "-o", str(made), str(openmp_runtime())]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        os.replace(made, path)


def load(march: str = "native") -> Built:
    """Build for this instruction set unless that was done before, and load. Never raises for want of a compiler."""
    if why := obstacle():
        return Built(why=why)
    flags = (*FLAGS, f"-march={march}")
    try:
        path = target(flags)
        if not path.exists():
            compile_to(path, flags)
        return Built(ctypes.CDLL(str(path)))
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines() or ["?"]
        return Built(why=f"{compiler()} failed: {lines[0].strip()}")
    except (OSError, subprocess.SubprocessError) as error:
        return Built(why=f"building them failed: {error}")


@functools.cache
def built() -> Built:
    """The library for this machine, built at most once per process."""
    return load()


def available() -> bool:
    """Whether the kernels can be used. The first call may compile, which takes some seconds."""
    return built().library is not None


def why() -> str:
    """Why the kernels cannot be used, in one plain line; empty when they can."""
    return built().why


@functools.cache
def note_once() -> None:
    """Tell the user, once per process, that plain PyTorch does the work and why."""
    if not available():
        line = f"kvatlas: the fast CPU kernels are not in use ({why()}); plain PyTorch does the same, only slower."
        print(line, file=sys.stderr)
