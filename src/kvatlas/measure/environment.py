"""Versions and hardware for the record, and what dtype the hardware computes in."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

from kvatlas.measure.schema import Environment
from kvatlas.version import __version__

BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16", "avx10_1"}  # processor flags (x86, Arm) of products in bfloat16


def environment(device: str = "cpu") -> Environment:
    """What ran, on what, now."""
    import psutil
    import torch
    import transformers

    accelerator = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return Environment(
        kvatlas=__version__,
        torch=torch.__version__,
        transformers=transformers.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu_name(),
        cores=cores(),
        memory_bytes=psutil.virtual_memory().total,
        accelerator=accelerator,
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def speed_dtype(asked: str, device: str) -> str:
    """``auto`` is bfloat16 where the hardware computes in it, else float32."""
    if asked != "auto":
        return asked
    return "bfloat16" if computes_bfloat16(device) else "float32"


def computes_bfloat16(device: str) -> bool:
    """Whether products in bfloat16 are the hardware's own, not emulated."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 0)
    return bool(BFLOAT16 & set(_cpu_field("flags", "Features").split()))


def cpu_name() -> str:
    """The processor's name, as well as the system knows it."""
    return _cpu_field("model name") or platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_field(*names: str) -> str:
    """The first of these fields in /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in fields if name.strip() in names), "")
