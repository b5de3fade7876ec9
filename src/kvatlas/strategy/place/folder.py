"""The folder that a cache's files live in: made when needed, gone with its process, cleaned up after a crash."""

from __future__ import annotations

import errno
import mmap
import os
import re
import shutil
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from weakref import finalize

from kvatlas.errors import UserError

try:
    import fcntl
except ImportError:  # not POSIX
    fcntl = None  # type: ignore[assignment]

PAGE = 4096
"""Bytes to which offsets, lengths and addresses of direct I/O are aligned."""
NAME = re.compile(r"kvatlas-(\d+)-(\d+)-")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
YOUNG = 60.0
"""Seconds in which a folder without a lock may still be in the making."""


class Folder:
    """A fresh folder in ``parent`` (default: the system's folder for temporary files).

    Its name carries the process and when that began, and a locked file in it says that it is in use: the next one
    that is made in the same parent removes those whose process is gone. ``direct`` asks for direct I/O (None: where
    it works).

    Raises:
        UserError: where nothing can be written, or direct I/O was asked for and does not work.
    """

    def __init__(self, parent: str | None, direct: bool | None) -> None:
        if not hasattr(os, "preadv") or fcntl is None:
            raise UserError("disk: this system has no preadv and pwritev; use host instead")
        self.parent = Path(parent) if parent else Path(tempfile.gettempdir())
        try:
            self.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.parent)
            self.path = Path(tempfile.mkdtemp(prefix=f"kvatlas-{os.getpid()}-{_began(os.getpid())}-", dir=self.parent))
            self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self.explained(error) from error
        self._gone = finalize(self, _remove, self.path, self._lock, os.getpid())
        _try_lock(self._lock)
        self.direct = direct_works(str(self.path)) if direct is None else direct
        if direct and not direct_works(str(self.path)):
            raise UserError(f"disk: the filesystem of {self.parent} has no direct I/O; use direct=auto or direct=false")
        self._files = 0

    def new_file(self) -> Path:
        """A path that was not used before."""
        self._files += 1
        return self.path / f"{self._files}.kv"

    def explained(self, error: OSError) -> UserError:
        """What to tell the user."""
        if error.errno in FULL:
            return UserError(f"disk: no room left in {self.parent}; free some, or name another folder with dir=")
        return UserError(
            f"disk: cannot write in {self.parent} ({error.strerror}); name a folder that you may write to with dir="
        )


def remove_leftovers(parent: Path) -> None:
    """Remove the folders that processes which are gone have left in ``parent``."""
    for path in parent.glob("kvatlas-*-*-*"):
        found = NAME.match(path.name)
        if found is None or _alive(int(found[1]), int(found[2])):
            continue
        try:
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            lock = None
        if lock is None:
            try:
                ours = time.time() - path.stat().st_mtime > YOUNG
            except OSError:
                continue
        else:  # process numbers mean nothing where machines or containers share a folder; a lock does
            ours = _try_lock(lock)
        if ours:
            shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@lru_cache(maxsize=64)
def direct_works(folder: str) -> bool:
    """Direct I/O is possible with files in this folder."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return False
    page = mmap.mmap(-1, PAGE)
    try:
        file, name = tempfile.mkstemp(prefix=".kvatlas-", dir=folder)
    except OSError:
        return False
    try:
        os.close(file)
        file = os.open(name, os.O_RDWR | flag | os.O_CLOEXEC)
        try:
            return os.pwrite(file, page, 0) == PAGE and os.preadv(file, [page], 0) == PAGE
        finally:
            os.close(file)
    except OSError:
        return False
    finally:
        os.unlink(name)


def _began(pid: int) -> int:
    import psutil

    return int(psutil.Process(pid).create_time())


def _alive(pid: int, began: int) -> bool:
    import psutil

    try:
        return abs(psutil.Process(pid).create_time() - began) < 2.5  # the clock may have been set since
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _try_lock(file: int) -> bool:
    """Lock a file, for as long as it is open; False when another process has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked child does not clear up its parent's files
        return
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
