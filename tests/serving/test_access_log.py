"""The line that a server or a router writes about a request, as an object (`--log-format json`)."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from foreword.api.http import configure_logging
from foreword.api.outcomes import Access, log_request
from foreword.usage import TokenUsage


@pytest.fixture(autouse=True)
def log_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is as it was afterwards."""
    root = logging.getLogger()
    for name in ("handlers", "level"):
        monkeypatch.setattr(root, name, getattr(root, name))
    root.handlers = []
    monkeypatch.setattr(logging, "_srcfile", logging._srcfile)


def objects(said: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.readouterr().err.splitlines()]


def test_a_request_is_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    """The object of a request has its id, tenant, model, replica, tokens, cached tokens and time to first token, and the text
    of the line; what is not known is left out."""
    configure_logging("info", "json")
    usage = TokenUsage(prompt=2139, output=32, cached=2048, model="m")
    log_request("POST", "/v1/completions", 200, 0.5, "r1", lambda: Access("team", usage, "http://a:1", 0.05))
    log_request("GET", "/v1/models", 401, 0.25, "r2")
    first, second = objects(capsys)
    assert first.pop("time").endswith("+00:00") and first.pop("message") == "POST /v1/completions 200 0.500 s [r1]"
    assert first == {
        "level": "INFO", "request_id": "r1", "method": "POST", "path": "/v1/completions", "status": 200, "seconds": 0.5,
        "tenant": "team", "model": "m", "replica": "http://a:1", "prompt_tokens": 2139, "cached_tokens": 2048,
        "output_tokens": 32, "ttft": 0.05,
    }  # fmt: skip
    assert {*second} == {"time", "level", "message", "request_id", "method", "path", "status", "seconds"}


def test_any_line_is_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines with quotes, line breaks and tracebacks are one object on one line each."""
    configure_logging("info", "json")
    try:
        raise ValueError('a "quoted"\nerror')
    except ValueError:
        logging.getLogger("foreword").exception("it\nfailed: %s", "\udce4")
    [one] = objects(capsys)
    assert one["level"] == "ERROR" and one["message"].startswith("it\nfailed") and "Traceback" in one["exception"]


def test_text_is_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the option a line is text."""
    configure_logging("info")
    log_request("GET", "/v1/models", 200, 0.25, "r2", lambda: Access("team"))
    assert capsys.readouterr().err.endswith("INFO GET /v1/models 200 0.250 s [r2]\n")
