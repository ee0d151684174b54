"""Serve a built site on the local host.

Usage: python docs/tools/serve.py build/docs/html [PORT]
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""


def make_server(site: Path, port: int) -> ThreadingHTTPServer:
    """Return a server of `site` on the loopback interface; port 0 selects a free port."""
    return ThreadingHTTPServer(("127.0.0.1", port), partial(_Quiet, directory=str(site)))


@contextlib.contextmanager
def serving(site: Path) -> Iterator[str]:
    """Serve `site` in a thread; yield its address without a trailing slash."""
    server = make_server(site, 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main(arguments: list[str]) -> int:
    """Serve until interrupted."""
    site = Path(arguments[0])
    port = int(arguments[1]) if len(arguments) > 1 else 8000
    with make_server(site, port) as server:
        print(f"Serving http://127.0.0.1:{server.server_port}/ until Ctrl-C.")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
