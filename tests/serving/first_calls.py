"""The first conversations of real clients, recorded (`record_first_calls.py`), and what each front answers to them.

    python tests/serving/first_calls.py

starts a server, a router, and with FOREWORD_VLLM_PYTHON a router before a real vLLM, sends them all conversations, and writes
the table of docs/guides/agents.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "integrations"))

import httpx

import foreword

FOLDER = Path(__file__).parent / "first_calls"
PAGE = Path(__file__).parents[2] / "docs/guides/agents.md"
MODEL = Path(foreword.__file__).parent / "models" / "stdlib-nano"
RECORDED_MODEL = "stdlib-nano"
FRONTS = ("server", "router", "router before vLLM")
_MARKS = "<!-- Written by tests/serving/first_calls.py: {} -->"
_DIALECTS = {
    "/v1/chat/completions": "chat completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/completions": "completions",
}
# How the stream of each dialect ends.
_ENDS = {
    "/v1/chat/completions": r"data: \[DONE\]",
    "/v1/completions": r"data: \[DONE\]",
    "/v1/responses": "event: response.(completed|incomplete)",
    "/v1/messages": "event: message_stop",
}


@dataclass(frozen=True)
class FirstCall:
    """A client's first conversation: requests with `method`, `path`, `headers`, `body` and the `status` they had."""

    client: str
    version: str
    requests: list[dict[str, Any]]

    @property
    def dialects(self) -> list[str]:
        paths = [one["path"].partition("?")[0] for one in self.requests]
        return [word for path, word in _DIALECTS.items() if path in paths]

    @property
    def name(self) -> str:
        return self.client.replace(" ", "-").lower()


def first_calls() -> list[FirstCall]:
    return [FirstCall(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(FOLDER.glob("*.json"))]


def replay(call: FirstCall, url: str, model: str = RECORDED_MODEL) -> list[str]:
    """Send a conversation's requests in order. What is wrong with the answers; empty if nothing is."""
    found = []
    with httpx.Client(base_url=url, timeout=300, verify=False) as client:
        for number, one in enumerate(call.requests):
            body = json.dumps(_limited(one)).replace(RECORDED_MODEL, model) if one["body"] is not None else None
            path = one["path"].replace(RECORDED_MODEL, model)
            answer = client.request(one["method"], path, headers=one["headers"], content=body)
            if problem := _problem(one, answer):
                found.append(f"{number}. {one['method']} {path}: {problem}: {answer.text[-400:]}")
    return found


def _limited(one: dict[str, Any]) -> dict[str, Any]:
    """Its body with a limit of output, if it has none: the small model does not end by itself."""
    name = "max_output_tokens" if one["path"].startswith("/v1/responses") else "max_tokens"
    limited = {"max_tokens", "max_completion_tokens", name} & one["body"].keys()
    is_generated = one["path"].partition("?")[0] in _ENDS
    return one["body"] if limited or not is_generated else {**one["body"], name: 16}


def _problem(one: dict[str, Any], answer: httpx.Response) -> str:
    if answer.status_code != one["status"]:
        return f"{answer.status_code} instead of {one['status']}"
    path = one["path"].partition("?")[0]
    if one["status"] == 200 and path in _ENDS:
        if not one["body"].get("stream"):
            return "" if isinstance(answer.json(), dict) else "no object"
        if re.search(r"^event: error$", answer.text, re.MULTILINE):
            return "the stream has an error"
        return "" if re.search(f"^{_ENDS[path]}", answer.text, re.MULTILINE) else "the stream has no end"
    return ""


@contextlib.contextmanager
def fronts(*, vllm: bool) -> Iterator[dict[str, tuple[str, str]]]:
    """The URL of each front, and the name of its model."""
    from router_parts import RouterProcess
    from server_process import ServerProcess
    from vllm_behind_router import vllm_behind_router

    with contextlib.ExitStack() as stack:
        servers = [ServerProcess("--dtype", "float32", "--no-self-check") for _ in range(2)]
        for one in servers:
            stack.callback(one.kill)
        urls = [one.wait_ready() for one in servers]
        router = RouterProcess("--replica", urls[0], "--replica", urls[1])
        stack.callback(router.kill)
        router.wait_for(2)
        found = {"server": (urls[0], RECORDED_MODEL), "router": (router.url, RECORDED_MODEL)}
        if vllm:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "vllm.log"
            flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
            found["router before vLLM"] = (stack.enter_context(vllm_behind_router(MODEL, log, *flags)).url, "tiny")
        yield found


def table(results: dict[tuple[str, str], list[str]]) -> str:
    """Lines of Markdown: a row for each client and dialect."""
    lines = ["| Client | Dialect | " + " | ".join(FRONTS) + " |", "|---|---|" + "---|" * len(FRONTS)]
    for call in first_calls():
        words = [_word(results.get((call.client, front))) for front in FRONTS]
        lines.append(f"| {call.client} {call.version} | {', '.join(call.dialects)} | {' | '.join(words)} |")
    return "\n".join(lines)


def _word(problems: list[str] | None) -> str:
    return "not tried" if problems is None else "passes" if not problems else "fails"


def main() -> int:
    results: dict[tuple[str, str], list[str]] = {}
    with fronts(vllm="FOREWORD_VLLM_PYTHON" in os.environ) as found:
        for front, (url, model) in found.items():
            for call in first_calls():
                results[call.client, front] = problems = replay(call, url, model)
                print(f"{front}: {call.client}: {problems or 'passes'}", flush=True)
    begin, end = (_MARKS.format(word) for word in ("begin", "end"))
    before, rest = PAGE.read_text(encoding="utf-8").split(begin)
    PAGE.write_text(f"{before}{begin}\n\n{table(results)}\n\n{end}{rest.split(end)[1]}", encoding="utf-8")
    return int(any(results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
