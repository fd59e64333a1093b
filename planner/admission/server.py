"""HTTP endpoint of an operator's loop: submit jobs, and see what became of them."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from planner.admission.journal import Journal, JournalError, JournalJob
from planner.admission.operator import progress
from planner.errors import ExecutionError, MeshwrightError, StrategyError
from planner.reading import parse_json
from planner.schema.admission import JobRequest

__all__ = ["make_server", "run_server", "status_of"]

_LOG = logging.getLogger(__name__)

#: Largest body of a request.
_MOST_BYTES = 1_000_000
#: Time that a client may take for its request.
_CLIENT_S = 10.0


def status_of(journal: Journal, last: int = 50) -> dict[str, Any]:
    """Return jobs and the last events of a journal as JSON values."""
    given = {each.job: each for each in journal.reservations()}
    jobs = []
    for job in journal.jobs():
        kept = given.get(job.name) if job.status == "active" else None
        data = _job_data(job)
        data["expected_end_s"] = None if kept is None else kept.finish_s
        jobs.append(data)
    return {"jobs": jobs, "events": journal.events(last)}


def _job_data(job: JournalJob) -> dict[str, Any]:
    return {
        "name": job.name,
        "status": job.status,
        "promised": job.promised,
        "deadline_s": job.request.deadline_s,
        "reason": job.reason,
        "broken": job.broken or None,
        "launches": job.launches,
        "ended_s": job.ended_s,
    }


def make_server(
    journal: Journal,
    host: str,
    port: int,
    *,
    token: str | None,
    wake: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.time,
) -> ThreadingHTTPServer:
    """Return a server that listens, to be run by ``serve_forever`` in a thread.

    ``GET /status``, ``GET /jobs/NAME``, ``POST /jobs``, ``POST /jobs/NAME/progress``
    and ``DELETE /jobs/NAME``; bodies are JSON.

    Args:
        journal: The journal.
        host: Address to listen on.
        port: Port; 0 for any.
        token: Token that requests must bear; None for none.
        wake: Called when a job was submitted.
        clock: Time in seconds.

    Raises:
        StrategyError: If others than this machine could call it, and there is no token.
        ExecutionError: If it cannot listen there.
    """
    if token is None and not _loopback(host):
        raise StrategyError(
            f"--host {host} lets other machines submit jobs; give a token with "
            f"--token-file, or listen on 127.0.0.1"
        )
    if token is not None and len(token) < 16:
        raise StrategyError(
            f"a token of {len(token)} characters; give at least 16, for example of "
            f"openssl rand -hex 16"
        )

    class Handler(_Handler):
        pass

    Handler.journal, Handler.token = journal, token
    Handler.woken, Handler.now = staticmethod(wake), staticmethod(clock)
    try:
        return ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise ExecutionError(
            f"cannot listen on {host}:{port}: {error.strerror}; give another "
            f"--host or --port"
        ) from error


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    journal: Journal
    token: str | None
    woken: Callable[[], None]
    now: Callable[[], float]
    timeout = _CLIENT_S
    server_version = "meshwright"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer what was asked."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Take a job, or its progress."""
        self._answer(self._post)

    def do_DELETE(self) -> None:
        """Cancel a job."""
        self._answer(self._delete)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Log a request."""
        _LOG.info(format, *arguments)

    def _answer(self, make: Callable[[], tuple[int, Any]]) -> None:
        try:
            code, data = make() if self._allowed() else self._forbidden()
        except JournalError as error:
            code, data = HTTPStatus.CONFLICT, {"error": str(error)}
        except MeshwrightError as error:
            code, data = HTTPStatus.BAD_REQUEST, {"error": str(error)}
        self._send(code, data)

    def send_error(
        self, code: int, message: str | None = None, explain: str | None = None
    ) -> None:
        """Answer what is no request, or of another method, in JSON as well."""
        self.close_connection = True
        self._send(code, {"error": message or HTTPStatus(code).phrase})

    def _send(self, code: int, data: Any) -> None:
        body = (json.dumps(data) + "\n").encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _allowed(self) -> bool:
        given = self.headers.get("Authorization", "")
        wanted = f"Bearer {self.token}"
        return self.token is None or hmac.compare_digest(
            given.encode(errors="replace"), wanted.encode()
        )

    def _forbidden(self) -> tuple[int, Any]:
        # The body is not read; the connection ends behind the answer.
        self.close_connection = True
        text = "send the token as Authorization: Bearer TOKEN"
        return HTTPStatus.UNAUTHORIZED, {"error": text}

    def _path(self) -> list[str]:
        return [part for part in self.path.partition("?")[0].split("/") if part]

    def _get(self) -> tuple[int, Any]:
        match self._path():
            case ["status"]:
                return HTTPStatus.OK, status_of(self.journal)
            case ["jobs", name]:
                job = self.journal.job(name)
                if job is not None:
                    request = job.request.to_data()
                    return HTTPStatus.OK, {**_job_data(job), "request": request}
        return self._unknown()

    def _unknown(self) -> tuple[int, Any]:
        text = f"{self.path} is not known; see GET /status"
        return HTTPStatus.NOT_FOUND, {"error": text}

    def _post(self) -> tuple[int, Any]:
        match self._path():
            case ["jobs"]:
                data = self._body()
                if isinstance(data, dict):
                    data.setdefault("submitted_s", self._submitted(data))
                request = JobRequest.from_data(data, where="the request")
                if not request.command:
                    raise StrategyError(
                        f"job {request.name} has no command; give the words that "
                        f"start it"
                    )
                new = self.journal.submit(request, self.now())
                self.woken()
                code = HTTPStatus.ACCEPTED if new else HTTPStatus.OK
                return code, {"name": request.name, "new": new}
            case ["jobs", name, "progress"]:
                data = self._body()
                done = data.get("iterations") if isinstance(data, dict) else None
                if not isinstance(done, int | float) or isinstance(done, bool):
                    raise StrategyError(
                        'give {"iterations": N}, the iterations that are done'
                    )
                progress(self.journal, name, float(done), self.now())
                return HTTPStatus.OK, {"name": name}
        return self._unknown()

    def _submitted(self, data: dict[str, Any]) -> float:
        """Time of a submission without one; that of the first if it is repeated."""
        known = self.journal.job(str(data.get("name")))
        return self.now() if known is None else known.request.submitted_s

    def _delete(self) -> tuple[int, Any]:
        match self._path():
            case ["jobs", name]:
                job = self.journal.job(name)
                if job is None:
                    return self._unknown()
                if job.status not in ("submitted", "active", "cancelled"):
                    raise JournalError(f"job {name} is {job.status}; it has ended")
                if job.status != "cancelled":
                    now = self.now()
                    with self.journal.transaction():
                        self.journal.set_job(name, status="cancelled", ended_s=now)
                        self.journal.event(now, "cancelled", name)
                    self.woken()
                return HTTPStatus.OK, {"name": name}
        return self._unknown()

    def _body(self) -> Any:
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip()
        # A page of a browser cannot send this type to another site unasked.
        if kind != "application/json":
            self.close_connection = True
            raise StrategyError("send JSON, with Content-Type: application/json")
        text = self.headers.get("Content-Length", "")
        if not text.isdigit() or int(text) > _MOST_BYTES:
            self.close_connection = True
            raise StrategyError(
                f"Content-Length {text!r}; send a body of at most {_MOST_BYTES:,} bytes"
            )
        return parse_json(self.rfile.read(int(text)), "the request", "job")


def run_server(server: ThreadingHTTPServer) -> threading.Thread:
    """Run a server in a thread that ends with the process."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    return thread
