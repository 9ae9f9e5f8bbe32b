"""A web server on this machine for as long as a block runs: that of harness serve, or of a folder's files."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@contextmanager
def answering(server: HTTPServer) -> Iterator[str]:
    """Inside, the server answers in a thread of its own, at the address that is given."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    with server:
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def files_of(folder: Path) -> ThreadingHTTPServer:
    """A server that gives out the files of a folder, as any web server does."""
    return ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
