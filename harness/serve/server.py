"""The web server of `harness serve`, over a folder of runs. Imports no torch.

It listens on 127.0.0.1 only and answers GET and HEAD. / is the page of a question, whose address holds the
question; /runs lists the runs; /report?run=NAME is the page of one of them. A name is looked up in the list
and never used as a path. A Host header that is not this server's own is refused, so that a page of the web
cannot reach it under a name of its own (DNS rebinding).

The page of a question gets its answers from /answer, /cards and /simulate, with a header that no other page
can send. harness/ask decides what a question may name. Simulations run one at a time, and each is killed
when its page is gone (asking.py).
"""

import html
import json
import re
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import cached_property, lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from harness.ask import arithmetic, cards
from harness.errors import HarnessError, InputError
from harness.report import read_run, render_page, report_html
from harness.serve.asking import Simulator, ask_page
from harness.serve.index import Entry, Index
from harness.serve.live import live_page
from harness.units import in_gib, in_ms

ADDRESS = "127.0.0.1"
MOST_COMPARED = 4
"""The most runs that one report compares."""
MOST_PAGES = 8
"""The most reports that are kept in memory, 5 MB each and more."""
READ_TIMEOUT_S = 30
"""How long a connection may be silent, in seconds."""
WAITING_CONNECTIONS = 1024
"""The connections that the kernel holds until they are accepted: a script may open a thousand at once."""
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">')
"""The content security policy that a page states for itself."""
ASKED = ("/answer", "/cards", "/simulate")
"""The paths from which the page of a question gets its answers."""
FROM_THE_PAGE = "X-Harness"
"""A header that the page of a question sends. For a page of another origin the browser would first ask the
server by OPTIONS whether it may send it, and be refused."""
ALWAYS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""The headers of every response."""
OTHER_METHODS = ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")


class Refused(Exception):
    """Raised for a request that is refused: the status of the response, and the reason that it gives."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Pages:
    """The pages of a folder, made when they are requested and kept until the files behind them change."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError if there is no such folder."""
        self.index = Index(folder)
        self.simulator = Simulator()
        self._cached_report = lru_cache(MOST_PAGES)(lambda *entries: _page_of(entries))
        self._listed: tuple[list[Entry], str] = [], ""
        """The last list of entries, and its page."""
        self._one_at_a_time = threading.Lock()

    def page(self, target: str) -> str:
        """The HTML at a request's target. Raises Refused where there is none, InputError for bad files."""
        parts = urlsplit(target)
        if not target.startswith("/") or target.startswith("//"):
            raise Refused(HTTPStatus.BAD_REQUEST, "The address must begin with a single slash.")
        asked_s = time.monotonic()
        with self._one_at_a_time:
            if parts.path == "/":  # the page itself reads the question from its address
                return self._ask_page
            if parts.path == "/runs" and not parts.query:
                return self._list(asked_s)
            if parts.path == "/report":
                return self._report(parts.query)
        raise Refused(HTTPStatus.NOT_FOUND, "There is no such page.")

    @cached_property
    def _ask_page(self) -> str:
        return ask_page("serve", runs=f"Runs in {self.index.folder.name or self.index.folder}")

    def _list(self, asked_s: float) -> str:
        """The list of all entries."""
        entries = self.index.entries(asked_s)
        if entries is not self._listed[0]:
            self._listed = entries, self._render_list(entries)
        return self._listed[1]

    def _render_list(self, entries: list[Entry]) -> str:
        profiles = [entry for entry in entries if entry.kind == "profile"]
        return render_page(
            "serve.html",
            home="/",
            title=f"Runs in {self.index.folder.name or self.index.folder}",
            data={"mostCompared": MOST_COMPARED},
            scripts=("serve.js",),
            charts=False,
            groups=[  # profiles in files of their own, such as the shipped ones, come after runs
                ("runs", "Runs and sweeps", [entry for entry in entries if entry.kind != "profile"]),
                ("profiles", "Profiles in files of their own", profiles),
            ],
            total=len(entries),
            left_out=self.index.left_out,
            folder=str(self.index.folder),
            in_gib=in_gib,
            in_ms=in_ms,
        )

    def _report(self, query: str) -> str:
        """The report of what the query names: runs of the folder, or simulations of this server."""
        try:
            fields = parse_qs(query, strict_parsing=True, max_num_fields=MOST_COMPARED + 1)
        except ValueError:
            fields = dict[str, list[str]]()
        if "asked" in fields:
            return self._report_of_simulations(fields["asked"])
        names = fields.get("run", [])
        if not 1 <= len(names) <= MOST_COMPARED:
            raise Refused(HTTPStatus.BAD_REQUEST, f"Choose one to {MOST_COMPARED} runs.")
        known = {entry.name: entry for entry in self.index.entries()}  # no name is ever used as a path
        entries = [known[name] for name in names if name in known]
        if len(entries) < len(names):
            raise Refused(HTTPStatus.NOT_FOUND, "There is no such run in the folder.")
        if any(entry.kind in ("running", "stopped") for entry in entries):
            if len(entries) > 1:
                raise InputError("A run without a profile cannot be compared. Choose it alone.")
            return live_page(entries[0])
        return self._cached_report(*entries)

    def _report_of_simulations(self, numbers: list[str]) -> str:
        runs = [run for number in numbers if (run := self.simulator.run(number)) is not None]
        if len(runs) < len(numbers) or len(runs) > MOST_COMPARED:
            raise Refused(HTTPStatus.NOT_FOUND, "That simulation is not kept any more. Ask again.")
        return report_html([read_run(run) for run in runs], home="/")


def _page_of(entries: Sequence[Entry]) -> str:
    """The report about some runs, profiles and snapshots, or about one sweep."""
    if any(entry.kind == "sweep" for entry in entries):
        if len(entries) > 1:
            raise InputError("A sweep compares its own cells. Choose it alone, or choose runs and profiles.")
        from harness.sweep import Sweep, sweep_html

        return sweep_html(Sweep.read(entries[0].path / "sweep.json"), home="/runs")
    return report_html([read_run(entry.path) for entry in entries], home="/runs")


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server_version = "harness"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = READ_TIMEOUT_S
    server: "_Server"  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        """Send the page, or a page that says why there is none."""
        try:
            self._check_host()
            if urlsplit(self.path).path in ASKED:
                return self._answer_question()
            status, page = HTTPStatus.OK, self.server.pages.page(self.path)
        except Refused as refused:
            status, page = refused.status, _message(str(refused))
        except HarnessError as error:
            status, page = HTTPStatus.UNPROCESSABLE_ENTITY, _message(str(error))
        except Exception:
            traceback.print_exc()
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            page = _message("This is a bug; the terminal of harness serve says more.")
        self._send(status, page)

    do_HEAD = do_GET

    def _answer_question(self) -> None:
        """Send the document for a question; for a simulation its documents, one a line, until it is over or
        the page is gone. Raises Refused for a request that the page did not send."""
        own = f"http://{self.headers['Host']}"
        if (
            self.command != "GET"
            or self.headers.get(FROM_THE_PAGE) is None
            or self.headers.get("Origin", own) != own
            or self.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin"
        ):
            raise Refused(HTTPStatus.FORBIDDEN, "Only the page of this server asks that.")
        parts = urlsplit(self.path)
        if parts.path != "/simulate":
            document = arithmetic(parts.query) if parts.path == "/answer" else cards(parts.query)
            self._send(HTTPStatus.OK, json.dumps(document), "application/json")
            return self.server.pages.simulator.warm()
        self.close_connection = True  # the end of the documents is the end of the connection
        self._send_head(HTTPStatus.OK, {"Content-Type": "application/x-ndjson", "Connection": "close"})
        documents = self.server.pages.simulator.documents(parts.query, self._is_listening)
        with closing(documents), suppress(ConnectionError):
            for document in documents:
                self.wfile.write(json.dumps(document).encode() + b"\n")

    def _is_listening(self) -> bool:
        """Whether the browser still holds the connection open."""
        ready, _, _ = select.select([self.connection], [], [], 0)
        try:
            return not ready or self.connection.recv(1, socket.MSG_PEEK) != b""
        except ConnectionError:
            return False

    def __getattr__(self, name: str) -> Any:
        if name.removeprefix("do_") in OTHER_METHODS:
            return self._refuse_method
        raise AttributeError(name)

    def _refuse_method(self) -> None:
        self.close_connection = True  # a body may follow, and nobody reads it
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, _message("Only GET and HEAD are answered."))

    def _check_host(self) -> None:
        """Raise Refused for a request that reached this server under another name than its own."""
        port = self.server.server_port
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0].lower() not in (f"{ADDRESS}:{port}", f"localhost:{port}"):
            raise Refused(HTTPStatus.FORBIDDEN, f"Open http://{ADDRESS}:{port}/ instead.")

    def _send(self, status: HTTPStatus, page: str, kind: str = "text/html") -> None:
        # The header repeats the page's own policy, which names its scripts by their hashes, and adds that no
        # other page may show it in a frame, which a policy inside a page cannot say.
        stated = POLICY.search(page) if kind == "text/html" else None
        policy = html.unescape(stated[1]) if stated else "default-src 'none'; style-src 'unsafe-inline'"
        body = page.encode()
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": f"{policy}; frame-ancestors 'none'",
        }
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = "GET, HEAD"
        self._send_head(status, headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_head(self, status: HTTPStatus, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, **ALWAYS}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for a request: do_GET prints the failures, and they alone are worth a line."""


class _Server(ThreadingHTTPServer):
    """The server, with a thread for each connection."""

    daemon_threads = True
    request_queue_size = WAITING_CONNECTIONS

    def __init__(self, pages: Pages, port: int) -> None:
        self.pages = pages
        super().__init__((ADDRESS, port), Handler)

    def server_close(self) -> None:
        """Stop listening, and kill the simulating process. `__init__` calls it where it cannot listen."""
        super().server_close()
        self.pages.simulator.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of a failure, unless a browser only closed its connection early."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def server_of(folder: Path, port: int) -> ThreadingHTTPServer:
    """The server of `folder`, which listens on `port` and answers once `serve_forever` is called.

    The port 0 takes a free one. Raises InputError for a folder that is none, and if it cannot listen.
    """
    pages = Pages(folder)
    try:
        return _Server(pages, port)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a port"
        raise InputError(f"--port {port}: {reason}. Give another one; 0 takes a free one.") from None


def _message(text: str) -> str:
    """A page with only a sentence and links."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>harness</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<style>:root{color-scheme:light dark}"
        "body{font:1rem/1.5 system-ui,sans-serif;margin:2rem;max-width:75ch}</style>"
        f"<p>{html.escape(text)}</p>"
        '<p><a href="/">Ask a question</a>, or see <a href="/runs">all runs</a></p></html>'
    )
