"""The process that tasks run in: ``python -m kvatlas.study.worker [--fork]``, one job a line of JSON on stdin.

With ``--fork`` it imports the libraries once and does each job in a fork of itself, so that a job has a process of its
own without waiting for imports again; without, it does one job and ends (CUDA cannot be forked).

Answers are lines of JSON on stdout: any number of ``progress``, then ``result``, ``user`` (a UserError) or ``failure``;
``ended`` with an exit code when a fork is gone. What libraries print goes to stderr. When stdin ends, whoever asked is
gone, and so is this process with its job.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn, TextIO

from kvatlas.errors import UserError

FULL = ("can't allocate memory", "not enough memory", "cannot allocate memory", "out of memory")
LOOK = 0.05
"""Seconds between two looks at whether a fork or the one who asked is gone."""


def main() -> NoReturn:
    """Serve jobs until stdin ends."""
    answers, reader = _own_stdout(), _Lines(0)
    if "--fork" not in sys.argv[1:]:
        job = json.loads(reader.next() or "{}")
        threading.Thread(target=_leave_with_parent, daemon=True).start()
        _work(job, answers)
    _preload()
    while line := reader.next():
        child = os.fork()
        if child == 0:
            _die_with_parent()
            _work(json.loads(line), answers)
        _tell(answers, "ended", code=_wait(child))
    os._exit(0)


def _work(job: dict[str, Any], answers: TextIO) -> NoReturn:
    """Do one job and end."""
    _give_way()
    try:
        from kvatlas.study import tasks

        task = tasks.TASKS[job.pop("task")]
        value = task(job, lambda share, text: _tell(answers, "progress", share=share, text=text))
        _tell(answers, "result", value=value)
    except UserError as error:
        _tell(answers, "user", error=one_line(error))
    except Exception as error:
        status = "out_of_memory" if is_memory(error) else "failed"
        _tell(answers, "failure", status=status, error=one_line(error))
        if status == "failed" and os.environ.get("KVATLAS_TRACEBACK"):
            import traceback

            traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)


def one_line(error: BaseException) -> str:
    """The error in one line, with its kind where that says more than the words."""
    text = " ".join(str(error).split())[:400]
    if isinstance(error, UserError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _tell(answers: TextIO, event: str, **values: Any) -> None:
    with contextlib.suppress(BrokenPipeError):
        answers.write(json.dumps({"event": event, **values}) + "\n")
        answers.flush()


def is_memory(error: Exception) -> bool:
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in FULL)


def _own_stdout() -> TextIO:
    """Stdout for our answers alone: whatever else prints, prints to stderr."""
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return own


class _Lines:
    """Whole lines of a file descriptor, without a lock that a fork could inherit."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self._rest = descriptor, b""

    def next(self) -> bytes:
        """The next line; empty at the end."""
        while b"\n" not in self._rest:
            part = os.read(self.descriptor, 1 << 20)
            if not part:
                return b""
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def _preload() -> None:
    """What every job imports. Nothing here may start threads or touch a device."""
    import transformers.models.llama.modeling_llama

    import kvatlas.quality.run
    import kvatlas.study.tasks

    del transformers, kvatlas


def _wait(child: int) -> int:
    """The fork's exit code (negative: a signal). If stdin ends first, the fork is killed and so are we."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if select.select([0], [], [], LOOK)[0]:  # no job comes while one is running: this is the end of stdin
            os.kill(child, signal.SIGKILL)
            os._exit(1)


def _leave_with_parent() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(1)


def _die_with_parent() -> None:
    """Linux: SIGKILL when the process that forked us is gone."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _give_way() -> None:
    """If the memory runs out, this process is to be ended, not the one that keeps the records (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    main()
