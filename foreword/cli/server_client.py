"""Calls of a running server's HTTP API, for commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from foreword.config_layers import read_secret
from foreword.errors import BadRequest, ConfigError, ForewordError, reason_of

if TYPE_CHECKING:
    import httpx


def plural(count: int, noun: str) -> str:
    """`1 block`, `2 blocks`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def check_url(url: str) -> None:
    """Raises ConfigError for what is not the URL of an HTTP server."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"a server's URL is written http://host:8000, not {url!r}")


def is_secure(url: str) -> bool:
    """Whether the server of a URL is verified. For others httpx need not read all certificates of the machine, which takes
    longer than a request."""
    return not url.lower().startswith("http:")


def call_server(server: str, api_key: str | None, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The server's JSON answer. Raises BadRequest with the server's message, or ConfigError if no server answers."""
    import httpx

    check_url(server)
    headers = {"authorization": f"Bearer {read_secret(api_key, '--api-key')}"} if api_key else {}
    try:
        # No read timeout: computing a long prefix may take minutes.
        timeout = httpx.Timeout(10, read=None)
        url, verify = server.rstrip("/").removesuffix("/v1") + path, is_secure(server)
        answer = httpx.request(method, url, json=body, headers=headers, timeout=timeout, verify=verify)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ConfigError(f"no answer from {server}: {reason_of(error)}; name the server with --server") from error
    try:
        found = answer.json()
    except ValueError:
        raise ConfigError(f"{server} did not answer as a Foreword server does (HTTP {answer.status_code})") from None
    if not answer.is_success:
        _raise_error(server, answer, found)
    return found


def _raise_error(server: str, answer: httpx.Response, body: Any) -> NoReturn:
    status = answer.status_code
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error  # vLLM asks for its key with a bare text
    if not isinstance(message, str):
        raise ConfigError(f"{server} did not answer as a Foreword server does (HTTP {status}){_vllm_hint(answer)}")
    if status >= 500:
        raise ForewordError(message)
    raise BadRequest(message)


def _vllm_hint(answer: httpx.Response) -> str:
    if answer.status_code != 404 or not answer.request.url.path.startswith("/v1/prefixes"):
        return ""
    return "; vLLM has named prefixes with --middleware foreword.integrations.vllm.NamedPrefixes"
