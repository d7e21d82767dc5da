"""`foreword demo`: conversations with a long common prefix, without prefix caching, with a cold cache and with a warm one.

Starts the real server twice, as a subprocess. Several clients stream answers over HTTP at once; the table shows their TTFT.
What the servers print goes to a file, whose end is shown if something fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from foreword import children
from foreword.api.dialects.choice_reader import ChoiceReader
from foreword.cli.commands import described
from foreword.errors import ForewordError

if TYPE_CHECKING:
    import httpx

QUESTIONS = (
    ("What does dedent do?", "And what does indent do?", "Which arguments does shorten take?"),
    ("What does shorten do?", "What is dedent for?", "Which arguments does indent take?"),
    ("Explain indent.", "What does dedent do?", "Show me the signature of shorten."),
    ("Describe shorten.", "Explain dedent.", "What does indent do?"),
)
PASSES = ("cache off", "cache on, cold", "cache on, warm")
START_SECONDS = 180.0
_SHOWN_LINES, _SHOWN_BYTES = 60, 1 << 16


class DemoFailed(ForewordError):
    """The server did not start or did not answer."""


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """An answer as its client saw it. `ttft` and `seconds` count from sending the request."""

    text: str
    ttft: float
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class DemoPass:
    """All conversations, once."""

    name: str
    seconds: float
    answers: tuple[DemoAnswer, ...]

    @property
    def median_ttft(self) -> float:
        return statistics.median(answer.ttft for answer in self.answers)

    @property
    def worst_ttft(self) -> float:
        return max(answer.ttft for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.output_tokens for answer in self.answers) / self.seconds

    @property
    def cached_share(self) -> float:
        return sum(a.cached_tokens for a in self.answers) / sum(a.prompt_tokens for a in self.answers)


def manual() -> str:
    """The long common prefix: the second half of Python's own textwrap module, with its functions."""
    return inspect.getsource(textwrap)[-9000:]


def run_demo(say: Callable[[str], None], max_tokens: int) -> list[DemoPass]:
    """Run the three passes and report progress through `say`. Raises DemoFailed."""
    say("Starting a server without prefix caching ...")
    with server({"FOREWORD_ENGINE_ENABLE_PREFIX_CACHING": "false"}) as url:
        off = asyncio.run(_converse(PASSES[0], url, max_tokens, say))
    say("Starting a server with prefix caching ...")
    with server({}) as url:
        cold = asyncio.run(_converse(PASSES[1], url, max_tokens, say))
        warm = asyncio.run(_converse(PASSES[2], url, max_tokens, say))
    return [off, cold, warm]


@contextlib.contextmanager
def server(environment: Mapping[str, str]) -> Iterator[str]:
    """A `foreword serve` process on a free port; its URL once it is ready. float32, so that answers can be compared.

    Raises DemoFailed, with the end of what the server printed, if the server or a request fails.
    """
    import httpx

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "FOREWORD_ENGINE_DTYPE": "float32", "FOREWORD_SERVER_LOG_LEVEL": "warning", **environment}
    command = [sys.executable, "-m", "foreword", "serve", "--port", str(port)]
    with tempfile.TemporaryFile() as printed:
        process = children.start(command, env=env, stdout=printed, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(url, process)
            yield url
        except (ForewordError, httpx.HTTPError) as error:
            _stop(process)
            raise DemoFailed(f"{error}\nThe server printed:\n{_end_of(printed)}") from error
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _end_of(printed: IO[bytes]) -> str:
    """The last lines of a file."""
    printed.seek(max(0, printed.seek(0, os.SEEK_END) - _SHOWN_BYTES))
    lines = printed.read().decode("utf-8", "replace").splitlines()[-_SHOWN_LINES:]
    return "\n".join(f"  {line}" for line in lines) or "  nothing"


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    import httpx

    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise DemoFailed(f"the server ended with status {process.returncode} before it was ready")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", timeout=5, verify=False).status_code == 200:
                return
        time.sleep(0.1)
    raise DemoFailed(f"the server was not ready after {START_SECONDS:.0f} seconds")


async def _converse(name: str, url: str, max_tokens: int, say: Callable[[str], None]) -> DemoPass:
    """All clients at once. Each asks its questions one after the other; every prompt contains the conversation so far."""
    import httpx

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        await client.post("/v1/completions", json={"prompt": "warm up", "max_tokens": 4, "temperature": 0})
        started = time.perf_counter()
        talks = await asyncio.gather(*(_talk(client, questions, max_tokens) for questions in QUESTIONS))
        seconds = time.perf_counter() - started
    answers = tuple(answer for talk in talks for answer in talk)
    say(f"  {name}: {len(answers)} answers for {len(QUESTIONS)} clients in {seconds:.1f} s")
    return DemoPass(name, seconds, answers)


async def _talk(client: httpx.AsyncClient, questions: Sequence[str], max_tokens: int) -> list[DemoAnswer]:
    messages = [{"role": "system", "content": f"Answer questions about this module.\n\n{manual()}"}]
    answers = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answer = await _ask(client, messages, max_tokens)
        messages.append({"role": "assistant", "content": answer.text})
        answers.append(answer)
    return answers


async def _ask(client: httpx.AsyncClient, messages: Sequence[Mapping[str, str]], max_tokens: int) -> DemoAnswer:
    body = {
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    first, text, reader = 0.0, "", ChoiceReader()
    async for event in _events(client, body):
        text += "".join(choice.shown for choice in reader.read(event).choices or ())
        if reader.begun and not first:
            first = time.perf_counter() - started
    seconds, usage = time.perf_counter() - started, reader.usage
    return DemoAnswer(text, first or seconds, seconds, usage.prompt_tokens, usage.cached_tokens, usage.output_tokens)


async def _events(client: httpx.AsyncClient, body: Mapping[str, object]) -> AsyncIterator[bytes]:
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise DemoFailed(f"the server answered {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield line[6:].encode()


def same_answers(passes: Sequence[DemoPass]) -> bool:
    """Whether all passes gave the same texts."""
    texts = [[answer.text for answer in one.answers] for one in passes]
    return all(other == texts[0] for other in texts)


def as_json(passes: Sequence[DemoPass]) -> str:
    return json.dumps([asdict(one) for one in passes], indent=1)


def rows(passes: Sequence[DemoPass]) -> list[tuple[str, ...]]:
    """The table: one row per pass."""
    base = passes[0]
    return [
        (
            one.name,
            f"{one.median_ttft * 1000:.0f} ms",
            f"{one.worst_ttft * 1000:.0f} ms",
            f"{base.median_ttft / one.median_ttft:.1f}x",
            f"{one.tokens_per_second:.0f}",
            f"{one.cached_share:.0%}",
        )
        for one in passes
    ]


HEAD = ("", "TTFT (median)", "worst", "speed-up", "tokens/s", "cached prompt tokens")


def register(app: typer.Typer) -> None:
    """Add the command `demo`."""

    @app.command(**described("demo"))
    def demo(
        max_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 32,
        json_file: Annotated[
            Path | None, typer.Option("--json-file", help="Also write all figures to this file.")
        ] = None,
    ) -> None:
        """Compare TTFT with and without prefix caching.

        Runs conversations with a long common prefix without prefix caching, with a cold cache and with a warm cache.
        """
        from rich.console import Console
        from rich.table import Table

        console = Console(width=110 if not sys.stdout.isatty() else None)
        with children.ended_by_signals():
            passes = run_demo(console.print, max_tokens)
        table = Table(*HEAD, title="The same conversations, three times", title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows(passes):
            table.add_row(*row)
        console.print(table)
        total = sum(answer.prompt_tokens for answer in passes[0].answers)
        console.print(
            f"{len(QUESTIONS)} clients at once, {len(passes[0].answers)} answers, {total:,} prompt tokens per pass; the "
            "embedded model in float32 over HTTP, streaming."
        )
        if json_file is not None:
            json_file.write_text(as_json(passes), encoding="utf-8")
        if not same_answers(passes):
            raise DemoFailed("the answers differ between the passes, which is an error in Foreword")
        console.print("All three passes gave the same answers.")
