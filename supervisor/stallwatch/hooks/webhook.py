"""A POST with a signature, tried again a few times. No redirect is followed, no proxy is asked."""

from __future__ import annotations

import contextlib
import errno
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlsplit

from stallwatch import __version__
from stallwatch.hooks.notice import Notice
from stallwatch.hooks.signing import DELIVERY, SIGNATURE, TIMESTAMP, sign
from stallwatch.hooks.worker import Outcome

_AGAIN = frozenset({408, 425, 429})  # and every 5xx: the same request may succeed later
_LOOK_S = 0.1
_MAX_ANSWER = 4096


class WebhookHook:
    """Posts each notice to one URL. `place` is what may be said of it: no path, no query."""

    def __init__(
        self,
        url: str,
        *,
        place: str,
        secret: bytes,
        deadline_s: float,
        attempts: int,
        backoff: Sequence[float],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._url = urlsplit(url)
        self._place = place
        self._secret = secret
        self._deadline_s = deadline_s
        self._attempts = attempts
        self._backoff = tuple(backoff) or (0.0,)
        self._wall = wall

    def deliver(self, notice: Notice, abort: threading.Event) -> Outcome:
        """Until somebody took it (2xx), refused it for good, or the attempts are spent."""
        body = notice.body()
        for attempt in range(1, self._attempts + 1):
            problem, again = self._try(notice, body, abort)
            if not problem:
                return Outcome(attempts=attempt)
            if abort.is_set():
                return Outcome(f"{problem}; this daemon ends", attempt)
            if not again or attempt == self._attempts:
                break
            if abort.wait(self._backoff[min(attempt, len(self._backoff)) - 1]):
                return Outcome(f"{problem}; this daemon ends", attempt)
        return Outcome(f"{problem} (attempt {attempt} of {self._attempts})", attempt)

    def _try(self, notice: Notice, body: bytes, abort: threading.Event) -> tuple[str, bool]:
        """('' or what went wrong, whether to try again)."""
        try:
            status = self._post(body, self._headers(notice, body), abort)
        except ssl.SSLCertVerificationError as error:
            return f"{self._place}: its certificate was not accepted: {error.verify_message}", True
        except (OSError, http.client.HTTPException, RuntimeError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else ""
            return f"{self._place}: {why or type(error).__name__}", True
        if 200 <= status < 300:
            return "", False
        return f"{self._place} answered {status}", status >= 500 or status in _AGAIN

    def _headers(self, notice: Notice, body: bytes) -> dict[str, str]:
        now = int(self._wall())  # of this attempt: a receiver refuses what is old
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"stallwatch/{__version__}",
            DELIVERY: notice.id,
            TIMESTAMP: str(now),
        }
        if self._secret:
            headers[SIGNATURE] = sign(self._secret, now, body)
        return headers

    def _post(self, body: bytes, headers: dict[str, str], abort: threading.Event) -> int:
        assert self._url.hostname is not None  # HooksConfig checked it
        kind = (
            http.client.HTTPSConnection
            if self._url.scheme == "https"
            else http.client.HTTPConnection
        )
        connection = kind(self._url.hostname, self._url.port, timeout=self._deadline_s)
        path = self._url.path or "/"
        path += f"?{self._url.query}" if self._url.query else ""
        with contextlib.closing(connection), _ended(connection, self._deadline_s, abort):
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            answer.read(_MAX_ANSWER)
            return answer.status


@contextlib.contextmanager
def _ended(
    connection: http.client.HTTPConnection, deadline_s: float, abort: threading.Event
) -> Iterator[None]:
    """Shut the socket at the deadline or the abort; TimeoutError then.

    A socket's own timeout starts anew with each byte: a peer that sends one now and then would
    hold us for days.
    """
    until = time.monotonic() + deadline_s
    done, cut = threading.Event(), threading.Event()

    def watch() -> None:
        while not done.wait(_LOOK_S):
            if abort.is_set() or time.monotonic() > until:
                cut.set()
                sock = connection.sock
                if sock is not None:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)

    watcher = threading.Thread(target=watch, name="stallwatch-webhook-end", daemon=True)
    watcher.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if not cut.is_set():
            raise
    finally:
        done.set()
        watcher.join(1.0)
    if cut.is_set():  # half an answer looks whole to http.client: headers may end anywhere
        raise TimeoutError(errno.ETIMEDOUT, f"no whole answer within {deadline_s:g} s")
