"""Tasks in processes of their own, so that their memory and their failures are their own."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

from kvatlas.errors import UserError

OWN = "kvatlas:"
"""Lines of a child's stderr that are for the user begin so."""
Progress = Callable[[float, str], None]


class ChildFailed(Exception):
    """A task ended without a result. ``status`` is the record's word for it."""

    def __init__(self, status: str, error: str) -> None:
        super().__init__(error)
        self.status, self.error = status, error


class Workers:
    """Runs the tasks of ``kvatlas.study.worker``, one after the other. No process of it outlives this one.

    Args:
        device: on ``cpu`` (and where there is fork) the libraries are imported once for all tasks.
        threads: of each task.
    """

    def __init__(self, device: str, threads: int) -> None:
        self.forks = device == "cpu" and hasattr(os, "fork")
        self.threads = threads
        self._server: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._tail: list[str] = []
        self._told: set[str] = set()
        self._busy = False  # a task's process is there, as far as we were told

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def run(self, task: str, job: dict[str, Any], timeout: float, progress: Progress = lambda share, text: None) -> Any:
        """Run one task and return its result. ``progress(share, text)`` is called as it says how far it is.

        Raises:
            UserError: what the task says of the user's input.
            ChildFailed: out of memory, timed out, or any other failure.
        """
        server = self._server if self._server is not None and self._server.poll() is None else self._start()
        assert server.stdin is not None
        end, healthy = time.monotonic() + timeout, False
        self._busy = True
        try:
            with contextlib.suppress(BrokenPipeError):
                server.stdin.write(json.dumps({"task": task, **job}) + "\n")
                server.stdin.flush()
            value = self._result(end, timeout, progress)
            healthy = self.forks
            return value
        except UserError:
            healthy = self.forks
            raise
        except ChildFailed as error:
            healthy = self.forks and error.status != "timeout"
            raise
        finally:
            if not (healthy and self._ended()):
                self._stop()

    def _start(self) -> subprocess.Popen[str]:
        self._stop()
        quiet = {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        server = subprocess.Popen(
            [sys.executable, "-m", "kvatlas.study.worker", *(["--fork"] if self.forks else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
            errors="replace", start_new_session=True,
            env={**os.environ, **quiet, "OMP_NUM_THREADS": str(self.threads)},
        )  # fmt: skip
        self._lines, self._tail = queue.Queue(), []
        for target, more in ((_read, (server.stdout, self._lines)), (self._relay, (server.stderr, self._tail))):
            threading.Thread(target=target, args=more, daemon=True).start()
        self._server = server
        return server

    def _result(self, end: float, timeout: float, progress: Progress) -> Any:
        while True:
            event = self._event(end, timeout)
            if event["event"] == "progress":
                progress(event["share"], event["text"])
            elif event["event"] == "result":
                return event["value"]
            elif event["event"] == "user":
                raise UserError(event["error"])
            elif event["event"] == "ended":
                raise self._died(event["code"])
            else:
                raise ChildFailed(event["status"], event["error"])

    def _event(self, end: float, timeout: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise ChildFailed("timeout", f"not done after {timeout:g} s (--timeout)") from None
        if line is None:
            assert self._server is not None
            raise self._died(self._server.wait())
        event = json.loads(line)
        self._busy = event["event"] != "ended"
        return event

    def _ended(self) -> bool:
        """Whether the server says that its fork is gone: then it can take the next task."""
        if self._server is None or self._server.poll() is not None:
            return False
        with contextlib.suppress(ChildFailed):
            if self._busy:
                self._event(time.monotonic() + 10, 10)
        return not self._busy

    def _died(self, code: int) -> ChildFailed:
        """Why a task ended without a word. The system kills (SIGKILL) what takes the last of its memory."""
        if code == -signal.SIGKILL:
            return ChildFailed("out_of_memory", "killed by the system, as what takes the last memory is")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        time.sleep(0.1)  # the last lines of stderr
        last = f": {self._tail[-1]}" if self._tail else ""
        return ChildFailed("failed", f"the process ended with {how}{last}")

    def _relay(self, stream: TextIO, tail: list[str]) -> None:
        """Our own lines to the user, each once; the last of the rest is kept for the case that the process dies."""
        for line in stream:
            text = line.rstrip()
            if text.startswith(OWN) and text not in self._told:
                self._told.add(text)
                print(text, file=sys.stderr, flush=True)
            elif text:
                tail[:] = [*tail[-19:], text]
                if os.environ.get("KVATLAS_TRACEBACK"):
                    print(text, file=sys.stderr, flush=True)

    def _stop(self) -> None:
        """End the server and what it runs."""
        server, self._server = self._server, None
        if server is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(server.pid, signal.SIGKILL) if hasattr(os, "killpg") else server.kill()
        server.wait()


def _read(stream: TextIO, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)
