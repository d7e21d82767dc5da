"""Requests that `foreword explain` sends to a vLLM, a Foreword server or a router, and what they answer and publish."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from foreword.api.dialects.answer_reader import decode_object
from foreword.cli.server_client import is_secure
from foreword.errors import ForewordError, reason_of
from foreword.observability.scrape import KINDS, Kind, Scrape

# Token ids that every vocabulary has.
_TOKENS: Final = range(100, 250)
_CONNECT_SECONDS: Final = 5.0


class NoAnswer(ForewordError, code="no_answer", fault="operator"):
    """Nothing answers at the address, or not in time, or something else does. `setting`: what to change, "" if not known."""

    def __init__(self, message: str, setting: str = "") -> None:
        super().__init__(message)
        self.setting = setting


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The answer to a prompt.

    Attributes:
        error: what the server said instead of answering; "" for an answer.
        cached: cached prompt tokens; None if the server does not say.
        report: the cache report of a Foreword server.
        route: a router's decision in words.
    """

    status: int
    error: str
    tokens: int
    cached: int | None
    report: Mapping[str, Any] | None
    route: str

    @property
    def replica(self) -> str:
        """The replica that a router chose."""
        found = re.search(r"https?://[^\s,;]*[^\s,;:]", self.route)
        return found[0] if found else ""


class ProbedServer:
    """A server that is asked about. Every call ends before `deadline`, a time of `time.monotonic()`.

    Calls raise NoAnswer if nothing answers.
    """

    def __init__(self, url: str, key: str | None, admin_key: str | None, deadline: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.deadline = deadline
        self._keys = (key, admin_key or key)
        self.has_key = key is not None
        self.model: str | None = None

    def other(self, url: str) -> ProbedServer:
        """A client of another server, with the same keys and the same end."""
        return ProbedServer(url, *self._keys, self.deadline)

    def call(self, method: str, path: str, body: Any = None, *, admin: bool = False) -> httpx.Response:
        key = self._keys[admin]
        left = self.deadline - time.monotonic()
        # A router says so in time if no replica answers.
        headers = {"x-request-timeout": str(left / 3), **({"authorization": f"Bearer {key}"} if key else {})}
        if left <= 0:
            raise NoAnswer(f"the time for this command is over, and {self.url} has not answered {path}")
        try:
            timeout = httpx.Timeout(left, connect=min(left, _CONNECT_SECONDS))
            url = self.url + path
            return httpx.request(method, url, json=body, headers=headers, timeout=timeout, verify=is_secure(url))
        except httpx.InvalidURL as error:
            raise NoAnswer(f"{self.url} is not a URL: {error}") from None
        except httpx.TransportError as error:
            raise NoAnswer(f"no answer from {self.url}: {reason_of(error)}") from None

    def json(self, path: str, *, admin: bool = False) -> Any:
        """The JSON behind a path; None for an error, and for anything that is no JSON."""
        answer = self.call("GET", path, admin=admin)
        return body_of(answer) or None if answer.is_success else None

    def kind(self) -> Kind | None:
        """The kind of the server; None if it is none of them."""
        known = (self.json("/ui/data/kind") or {}).get("kind")
        text = self.call("GET", "/metrics").text
        # A proxy in front of a server may hide its pages.
        return next((kind for kind, name in KINDS.items() if known == kind or name in text), None)

    def metrics(self) -> Scrape:
        answer = self.call("GET", "/metrics")
        try:
            return Scrape(answer.raise_for_status().text)
        except (httpx.HTTPStatusError, ValueError):
            text = f"{self.url}/metrics has no metrics (HTTP status {answer.status_code})"
            raise NoAnswer(text, "what stands in front of the server, or the server's own URL here") from None

    def ask(self, prompt: Sequence[int], salt: str, *, report: bool = False) -> ProbeAnswer:
        """Compute one token after a prompt."""
        body: dict[str, Any] = {"model": self.model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
        body |= {"cache_salt": salt, **({"cache_report": True} if report else {})}
        answer = self.call("POST", "/v1/completions", body)
        found = body_of(answer)
        if "usage" not in found:  # a page to log in has status 200, too
            return ProbeAnswer(answer.status_code, error_of(answer), 0, None, None, "")
        usage = found["usage"] or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        route = answer.headers.get("x-foreword-route", "")
        return ProbeAnswer(200, "", usage.get("prompt_tokens", 0), cached, found.get("cache_report"), route)


def error_of(answer: httpx.Response) -> str:
    """The message of an error response, in a line."""
    body = body_of(answer)
    error = body.get("error", body.get("message"))
    text = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(text or f"HTTP status {answer.status_code}{'' if body else ', and no JSON'}").split())


def body_of(answer: httpx.Response) -> dict[str, Any]:
    """The JSON object of a response; an empty one for anything else."""
    return decode_object(answer.content)


def new_prompt(length: int) -> list[int]:
    """A prompt that was never sent before."""
    return [random.SystemRandom().choice(_TOKENS) for _ in range(length)]
