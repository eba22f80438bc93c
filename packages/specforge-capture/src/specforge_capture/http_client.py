"""Asking a server over HTTP with JSON: one connection a call, and three ways to fail.

A server's failure is one request's own: 5xx for one that may be tried again, 4xx for one that never will
succeed; `error.message` in the body says why.
"""

import http.client
import json
from typing import Any

from specforge_config.base import host_and_port

_RETRIED = (408, 425, 429)


class ServerDown(ConnectionError):
    """A server cannot be reached, broke the connection, or did not answer in time."""


class RequestFailed(RuntimeError):
    """A server failed a request, or answered with something else; it may be asked again."""


class RequestRefused(ValueError):
    """A server will never answer this request."""


class ServerClient:
    """Speaks to one server; used from any number of threads, a connection a call.

    Args:
        url: `http://host:port`.
        timeout: seconds that the server may stay silent.

    Raises:
        ValueError: for another kind of address.
    """

    def __init__(self, url: str, timeout: float) -> None:
        scheme, _, address = url.rstrip("/").partition("://")
        if scheme != "http":
            raise ValueError(f"server address {url!r}; required: http://host:port")
        self.url = url
        self._address = host_and_port(address)
        self._timeout = timeout

    def ask(self, verb: str, path: str, body: Any = None) -> Any:
        """Decoded JSON of the answer to one request.

        Args:
            verb: `GET` or `POST`.
            path: of the endpoint.
            body: what to send, as JSON.

        Raises:
            ServerDown: if the server does not answer.
            RequestFailed: if it failed, or its answer is no JSON.
            RequestRefused: if it will never answer this request.
        """
        connection = http.client.HTTPConnection(*self._address, timeout=self._timeout)
        try:
            connection.request(
                verb,
                path,
                None if body is None else json.dumps(body),
                {"Content-Type": "application/json", "Connection": "close"},
            )
            response = connection.getresponse()
            status, text = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerDown(f"{self.url}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if 400 <= status < 500 and status not in _RETRIED:
            raise RequestRefused(f"{self.url}: HTTP {status}: {_message(text)}")
        if status != 200:
            raise RequestFailed(f"{self.url}: HTTP {status}: {_message(text)}")
        try:
            return json.loads(text)
        except ValueError:
            raise RequestFailed(f"{self.url}: the answer is no JSON: {text[:200]!r}") from None


def _message(text: bytes) -> str:
    """What a server says about a failure: its `error.message`, or else the body's beginning. SGLang puts the
    message of a 500 at the top."""
    try:
        body = json.loads(text)
        return str(body.get("error", body)["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return repr(text[:500])
