"""Control a headless Chromium through its DevTools pipe: JSON messages, each terminated by a zero byte.

The pipe needs neither a port nor a package. Chromium reads commands from file descriptor 3 and writes results and
events to 4.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


class BrowserError(Exception):
    """The browser did not start, closed early, did not answer in time, or refused a command."""


def find_browser() -> str | None:
    """Return the path of an installed Chromium or Chrome, None if there is none."""
    named = os.environ.get("CHROME")
    candidates = (named, *NAMES) if named else NAMES
    return next((path for name in candidates if (path := shutil.which(name))), None)


class Tab:
    """One page of the browser, and the events that it has sent."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._buffer = b""
        self._count = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def attach(self) -> None:
        """Open an empty page and enable its events."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, *, timeout: float = 30.0, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; raise `BrowserError` if it fails."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + timeout
        while True:
            answer = self._receive(until, method)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error'].get('message')}")
                return dict(answer["result"])
            self.events.append(answer)

    def wait_for(self, method: str, timeout: float = 30.0) -> None:
        """Wait for an event of this name; events since `events` was last cleared count."""
        until = time.monotonic() + timeout
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._receive(until, method))

    def evaluate(self, expression: str) -> Any:
        """Return the JSON value of a JavaScript expression; a promise is awaited."""
        params = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        result = self.send("Runtime.evaluate", **params)
        if "exceptionDetails" in result:
            raise BrowserError(f"{expression!r}: {result['exceptionDetails'].get('text')}")
        return result["result"].get("value")

    def _receive(self, until: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = until - time.monotonic()
            ready = select.select([self._read], [], [], max(left, 0))[0] if left > 0 else []
            if not ready:
                raise BrowserError(f"No answer to {method} in time.")
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise BrowserError("The browser has closed.")
            self._buffer += piece
        raw, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(raw))


@contextlib.contextmanager
def browser(path: str) -> Iterator[Tab]:
    """Start a headless browser with a new profile, yield one tab, and close the browser afterwards."""
    to_browser_read, to_browser_write = os.pipe()
    from_browser_read, from_browser_write = os.pipe()

    def place_pipes() -> None:  # in the child: duplicate first, since 3 and 4 may already be ends of the pipes
        reads, writes = os.dup(to_browser_read), os.dup(from_browser_write)
        os.dup2(reads, 3)
        os.dup2(writes, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            path,
            "--headless=new",
            "--remote-debugging-pipe",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-first-run",
            f"--user-data-dir={profile}",
        ]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            command.append("--no-sandbox")  # the sandbox does not work as root; only our own pages are opened
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=place_pipes,
        )
        os.close(to_browser_read)
        os.close(from_browser_write)
        try:
            tab = Tab(to_browser_write, from_browser_read)
            tab.attach()
            yield tab
        finally:
            with contextlib.suppress(OSError):
                os.close(to_browser_write)
            try:
                process.wait(timeout=5)  # closing the pipe makes the browser exit
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(from_browser_read)
