"""Coding agents as they are, through a router to busy servers: turns that miss a prefix that a server has.

    python -m benchmarks.router.agents FOLDER [--only NAME] [--write] [--vllm PYTHON] [-- FLAGS]

FOLDER has the agents: `npm/node_modules` (@openai/codex, @anthropic-ai/claude-code, opencode-ai, @qwen-code/qwen-code,
@continuedev/cli, cline, @mariozechner/pi-coding-agent, @charmland/crush), and the virtual environments `py`
(openai-agents, strands-agents, pydantic-ai-slim, langgraph, langchain-openai) and `aider`. An agent that is not there is
left out. FLAGS are the router's.

Each agent works in two sessions, in a folder of its own each, on a question that takes some calls of tools. A relay passes
its requests to a router as they are, but for the length of the answer. The agent gets calls by script, since a random model
writes none (scripted_answers.py). Several agents work at once, beside clients with other prompts.

A prefix that a server has is what a request has in common with one that was answered before it was sent. A turn misses if
fewer of its tokens were cached, by two blocks or a hundredth. If the decision shows that the router knew better, the turn was
sent elsewhere on purpose, where it was expected to cost less than to wait for the server that has its prefix.

`--vllm` takes servers of vLLM, which this interpreter has.
`--record` writes whole requests for `foreword traffic clients`. `--write` writes the tables of dev/measurements/router.md
and, as that command does, of docs/guides/agents.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import httpx
from aiohttp import web

import foreword
from benchmarks.engine.random_model import SIZES, make
from benchmarks.harness import cores, machine, set_up, table, write_between
from benchmarks.router.fleet import START_SECONDS, Process, free_port, library, router, servers
from benchmarks.router.scripted_answers import answer, calls_before, next_call, usage_of
from foreword.api.dialects.decode import Limits
from foreword.api.dialects.registry import DIALECTS
from foreword.api.request import template_messages, template_tools
from foreword.cli.traffic import clients_markdown
from foreword.prompt_order import PromptOrder
from foreword.sim.client_report import client_report
from foreword.tokens.tokenizer import Tokenizer

ASK: Final = "Read file0.txt to file8.txt one by one and tell me what is in them."
CONTEXT: Final = 131_072
SECONDS: Final = 900.0
_TOKENS: Final = 16
# Requests of a session beyond its calls: some agents never end by themselves.
_MOST_MORE: Final = 6
_LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_READ: Final = Limits.for_model(1 << 20, 1 << 28, 0)
_PATHS: Final = re.compile(r".*/(chat/completions|responses|messages)")
_PAGES: Final = Path(__file__).parents[2]
MEASUREMENTS: Final = _PAGES / "dev/measurements/router.md"
GUIDE: Final = _PAGES / "docs/guides/agents.md"
_MARK: Final = "benchmarks.router.agents"
_NOT_PASSED: Final = frozenset(("host", "content-length", "connection", "accept-encoding", "transfer-encoding"))


class Agent(NamedTuple):
    """`version`: of the package that is found in the folder. `command` and `environment` take the relay's URL, the folder in
    which the agent works, and the model."""

    package: str
    command: Callable[[Path, str, Path, str], list[str]]
    environment: Callable[[str, str], dict[str, str]] = lambda url, model: {}


def _codex(programs: Path, url: str, folder: Path, model: str) -> list[str]:
    provider = ('model_providers.fw.name="fw"', 'model_providers.fw.wire_api="responses"', "model_provider=fw")
    settings = (*provider, f'model_providers.fw.base_url="{url}/v1"', "sandbox_mode=danger-full-access")
    given = [word for one in (*settings, "approval_policy=never") for word in ("-c", one)]
    return [str(programs / "codex"), "exec", "--skip-git-repo-check", *given, "-m", model, ASK]


def _claude(programs: Path, url: str, folder: Path, model: str) -> list[str]:
    return [str(programs / "claude"), "-p", ASK, "--model", model, "--allowedTools", "Bash,Read"]


def _opencode(programs: Path, url: str, folder: Path, model: str) -> list[str]:
    known = {model: {"limit": {"context": CONTEXT, "output": 1000}, "tool_call": True}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1", "apiKey": "none"}}
    config = {"permission": {"bash": "allow", "read": "allow"}, "provider": {"fw": {**provider, "models": known}}}
    (folder / "opencode.json").write_text(json.dumps(config))
    return [str(programs / "opencode"), "run", "-m", f"fw/{model}", ASK]


def _qwen(programs: Path, url: str, folder: Path, model: str) -> list[str]:
    where = ("--openai-api-key", "none", "--openai-base-url", f"{url}/v1", "-m", model)
    return [str(programs / "qwen"), "-y", "--auth-type", "openai", *where, "-p", ASK]


def _pi(programs: Path, url: str, folder: Path, model: str) -> list[str]:
    known = {"id": model, "contextWindow": CONTEXT, "maxTokens": 1000}
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "none", "models": [known]}
    (folder / ".pi/agent").mkdir(parents=True)
    (folder / ".pi/agent/models.json").write_text(json.dumps({"providers": {"fw": provider}}))
    return [str(programs / "pi"), "--provider", "fw", "--model", model, "-p", ASK]


def _continue(programs: Path, url: str, folder: Path, model: str) -> list[str]:
    limits = {"defaultCompletionOptions": {"contextLength": CONTEXT, "maxTokens": 1000}, "capabilities": ["tool_use"]}
    known = {"name": "m", "provider": "openai", "model": model, "apiBase": f"{url}/v1", "apiKey": "none"}
    config = {"name": "x", "version": "1.0.0", "schema": "v1", "models": [{**known, "roles": ["chat"], **limits}]}
    (folder / "config.yaml").write_text(json.dumps(config))
    return [str(programs / "cn"), "--config", "config.yaml", "--auto", "-p", ASK]


def _cline(programs: Path, url: str, folder: Path, model: str) -> list[str]:
    program = programs / "cline"
    login = f"{program} auth -p openai-compatible -k none -m {model} -b {url}/v1"
    return ["sh", "-c", f"{login}; {program} -y -P openai-compatible -m {model} -t 600 --retries 1 '{ASK}'"]


def _crush(programs: Path, url: str, folder: Path, model: str) -> list[str]:
    known = {"id": model, "name": model, "context_window": CONTEXT, "default_max_tokens": 1000}
    provider = {"type": "openai-compat", "base_url": f"{url}/v1", "api_key": "none", "models": [known]}
    used = {size: {"model": model, "provider": "fw"} for size in ("large", "small")}
    config = {"providers": {"fw": provider}, "models": used, "permissions": {"allowed_tools": ["bash", "view"]}}
    (folder / "crush.json").write_text(json.dumps(config))
    return [str(programs / "crush"), "run", "-q", ASK]


def _aider(programs: Path, url: str, folder: Path, model: str) -> list[str]:
    plain = ("--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--analytics-disable")
    where = ("--openai-api-base", f"{url}/v1", "--openai-api-key", "none")
    return [str(programs / "aider"), "--model", f"openai/{model}", *where, *plain, "--message", ASK, "file0.txt"]


def _script(text: str) -> Callable[[Path, str, Path, str], list[str]]:
    def command(programs: Path, url: str, folder: Path, model: str) -> list[str]:
        return [str(programs / "python"), "-c", f"URL, M, ASK = {url!r}, {model!r}, {ASK!r}\n{_TOOL}{text}"]

    return command


_TOOL: Final = """
RULES = "You know the weather. " * 60
def weather(city: str) -> str:
    "The weather in a city."
    return "sunny in " + city
"""
AGENTS: Final[Mapping[str, Agent]] = {
    "Codex CLI": Agent("@openai/codex", _codex, lambda url, model: {"OPENAI_API_KEY": "none"}),
    "Claude Code": Agent(
        "@anthropic-ai/claude-code",
        _claude,
        lambda url, model: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_SMALL_FAST_MODEL": model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
    ),
    "opencode": Agent("opencode-ai", _opencode),
    "Qwen Code": Agent(
        "@qwen-code/qwen-code", _qwen, lambda url, model: {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{url}/v1"}
    ),
    "Continue": Agent("@continuedev/cli", _continue),
    "Cline": Agent("cline", _cline),
    "pi": Agent("@mariozechner/pi-coding-agent", _pi),
    "Crush": Agent(
        "@charmland/crush",
        _crush,
        lambda url, model: {"CRUSH_DISABLE_PROVIDER_AUTO_UPDATE": "1", "CRUSH_DISABLE_METRICS": "1"},
    ),
    "aider": Agent("aider:aider_chat", _aider),
    "OpenAI Agents SDK, responses": Agent(
        "py:openai_agents",
        _script("""
import agents, openai
agents.set_tracing_disabled(True)
c = openai.AsyncOpenAI(base_url=URL + "/v1", api_key="none")
m = agents.OpenAIResponsesModel(model=M, openai_client=c)
a = agents.Agent(name="helper", instructions=RULES, tools=[agents.function_tool(weather)], model=m)
agents.Runner.run_sync(a, ASK, max_turns=9)
"""),
    ),
    "OpenAI Agents SDK, chat": Agent(
        "py:openai_agents",
        _script("""
import agents, asyncio, openai
agents.set_tracing_disabled(True)
c = openai.AsyncOpenAI(base_url=URL + "/v1", api_key="none")
m = agents.OpenAIChatCompletionsModel(model=M, openai_client=c)
a = agents.Agent(name="helper", instructions=RULES, tools=[agents.function_tool(weather)], model=m)
async def main():
    async for event in agents.Runner.run_streamed(a, ASK, max_turns=9).stream_events():
        pass
asyncio.run(main())
"""),
    ),
    "Strands": Agent(
        "py:strands_agents",
        _script("""
from strands import Agent, tool
from strands.models.openai import OpenAIModel
m = OpenAIModel(client_args={"base_url": URL + "/v1", "api_key": "none"}, model_id=M)
Agent(model=m, system_prompt=RULES, tools=[tool(weather)])(ASK)
"""),
    ),
    "pydantic-ai": Agent(
        "py:pydantic_ai_slim",
        _script("""
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
m = OpenAIChatModel(M, provider=OpenAIProvider(base_url=URL + "/v1", api_key="none"))
Agent(m, tools=[weather], instructions=RULES).run_sync(ASK)
"""),
    ),
    "LangGraph": Agent(
        "py:langgraph",
        _script("""
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
m = ChatOpenAI(base_url=URL + "/v1", api_key="none", model=M)
create_react_agent(m, [weather], prompt=RULES).invoke({"messages": [("user", ASK)]})
"""),
    ),
}


@dataclass
class Turn:
    """A request of an agent. Times are of `time.monotonic`; `problem` is empty for an answer that is whole."""

    client: str
    session: str
    path: str
    body: dict[str, Any]
    sent: float
    ended: float = 0.0
    prompt: int = 0
    cached: int = 0
    route: str = ""
    problem: str = ""
    tokens: list[int] = field(default_factory=list)
    expected: int = 0
    block: int = 16

    def __str__(self) -> str:
        return f"{self.client} {self.session} {self.path}"

    @property
    def shares(self) -> str:
        """Tokens that were cached, and the decision in words."""
        return f"{self.cached} of {self.expected} that a server had, of {self.prompt}; {self.route}"

    @property
    def missed(self) -> bool:
        """Whether less was cached than a server had, which the router did not know."""
        return self._has_less and not self.moved

    @property
    def moved(self) -> bool:
        """Whether the router knew of what the next server has, and chose another one. Estimated lengths may be a tenth off."""
        found = re.search(r"; next [^(]*\(([^)]*)\)", self.route)
        if not self._has_less or found is None:
            return False
        computed = re.search(r"computing (\d+) of (\d+) tokens", found[1])
        known = self.prompt * (1 - int(computed[1]) / int(computed[2])) if computed else self.prompt
        return known >= self.expected - max(self.block * 3, self.expected // 10)

    @property
    def _has_less(self) -> bool:
        """The last block may be another one where others share it, and a hundredth is for a server whose template writes a
        little more than ours."""
        return self.cached < self.expected - max(self.block * 2, self.expected // 100)


class Relay:
    """Stands between the agents and a router. `/NAME/SESSION/...` is passed on without its first two parts."""

    def __init__(self, target: str, turns: int) -> None:
        self._target, self._turns = target, turns
        self._folders: dict[tuple[str, str], str] = {}
        self._numbers = iter(range(1, 1 << 30))
        self.turns: list[Turn] = []

    async def __aenter__(self) -> Relay:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{name}/{session}/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        limit = aiohttp.ClientTimeout(total=SECONDS)
        self._session = aiohttp.ClientSession(timeout=limit, read_bufsize=1 << 22)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()
        await self._runner.cleanup()

    def url_for(self, name: str, session: str, folder: Path) -> str:
        """The base URL of a session that works in a folder."""
        key = (re.sub(r"\W+", "-", name), session)
        self._folders[key] = str(folder)
        return f"{self.url}/{key[0]}/{session}"

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        key = (request.match_info["name"], request.match_info["session"])
        path, data = f"/{request.match_info['path']}", await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _NOT_PASSED}
        url = self._target + path + (f"?{request.query_string}" if request.query_string else "")
        if request.method != "POST" or not _PATHS.fullmatch(path):
            async with self._session.request(request.method, url, data=data or None, headers=headers) as plain:
                kind = plain.headers.get("content-type", "text/plain").partition(";")[0]
                return web.Response(body=await plain.read(), status=plain.status, content_type=kind)
        body = json.loads(data)
        if sum((one.client, one.session) == key for one in self.turns) >= self._turns + _MOST_MORE:
            return web.Response(body=b'{"error": {"message": "enough"}}', status=400, content_type="application/json")
        turn = Turn(*key, path, body, time.monotonic())
        self.turns.append(turn)
        status, found = await self._ask(turn, url, headers)
        if status != 200:
            return web.Response(body=found, status=status, content_type="application/json")
        done, number = calls_before(body), next(self._numbers)
        call = next_call(body, done, self._folders[key]) if done < self._turns else None
        streamed = "text/event-stream" if body.get("stream") else "application/json"
        return web.Response(body=answer(path, body, call, number), content_type=streamed)

    async def _ask(self, turn: Turn, url: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Status and body of the router's answer, which the turn notes."""
        body = _shortened(turn.body, turn.path)
        try:
            async with self._session.post(url, json=body, headers=_without_type(headers)) as response:
                found, status = await response.read(), response.status
                turn.route = response.headers.get("x-foreword-route", "")
        except (aiohttp.ClientError, TimeoutError) as error:
            found, status = repr(error).encode(), 502
        turn.ended = time.monotonic()
        if status != 200:
            turn.problem = f"{status} {found[:300].decode('utf-8', 'replace')}"
            return status, found
        usage = usage_of(found, bool(body.get("stream")))
        turn.prompt, turn.cached = usage["prompt"], usage["cached"]
        if not (usage["ended"] and usage["prompt"]):
            turn.problem = f"not a whole answer: {found[-300:].decode('utf-8', 'replace')}"
        return status, found


def _without_type(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() != "content-type"}


def _shortened(body: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The body with a limit of a short answer, which reports its usage."""
    found = {**body, **{name: _TOKENS for name in _LIMITS if name in body}}
    if not any(name in body for name in _LIMITS):
        found["max_output_tokens" if path.endswith("responses") else "max_tokens"] = _TOKENS
    found.pop("thinking", None)  # its budget must be below the limit
    if path.endswith("completions") and body.get("stream"):
        found["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    return found


# The run


async def run(given: argparse.Namespace, root: Path, url: str) -> list[Turn]:
    """All sessions of the agents that are there, some at a time, beside other clients."""
    todo = [(name, session) for session in ("1", "2") for name in found_agents(root, given.only)]
    projects = random.Random(given.seed).choices(_PROJECTS, k=len(todo))
    seeds = [given.seed * 1000 + number for number in range(given.others)]
    busy = asyncio.gather(*(_other_client(url, given.model_name, seed) for seed in seeds))
    async with Relay(url, given.turns) as relay:
        queue = iter(zip(todo, projects, strict=True))

        async def work() -> None:
            for (name, session), project in queue:
                await _work(given, root, relay, name, session, project)

        try:
            await asyncio.gather(*(work() for _ in range(given.at_a_time)))
        finally:
            busy.cancel()
            with suppress(asyncio.CancelledError):
                await busy
        return relay.turns


async def _work(given: argparse.Namespace, root: Path, relay: Relay, name: str, session: str, project: str) -> None:
    agent = AGENTS[name]
    with tempfile.TemporaryDirectory(prefix=f"{project}-") as text:
        folder = Path(text)
        for number in range(9):
            (folder / f"file{number}.txt").write_text(f"This is file {number} of {folder.name}. " * 8 + "\n")
        at = relay.url_for(name, session, folder)
        command = agent.command(_programs(root, agent), at, folder, given.model_name)
        own = {"HOME": text, "PWD": text, "XDG_CONFIG_HOME": f"{text}/.config", "XDG_DATA_HOME": f"{text}/.data"}
        plain = {"TERM": "dumb", "LANG": "C.UTF-8", "NO_COLOR": "1", "PATH": os.environ["PATH"]}
        environment = {**plain, **own, **agent.environment(at, given.model_name)}
        pipe, closed = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        began, before = time.monotonic(), len(relay.turns)
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, env=environment, stdin=closed, stdout=pipe, stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = await asyncio.wait_for(process.communicate(), SECONDS)
        except TimeoutError:
            said = b"it did not end"
        finally:
            with suppress(ProcessLookupError):  # an agent and what it started outlive no run
                os.killpg(process.pid, 9)
        mine = sum(
            turn.client == re.sub(r"\W+", "-", name) and turn.session == session for turn in relay.turns[before:]
        )
        took = f"{time.monotonic() - began:.0f} s"
        print(f"  {name} {session}: status {process.returncode}, {mine} requests, {took}", flush=True)
        if process.returncode or not mine:
            print("    " + said[-600:].decode("utf-8", "replace").replace("\n", "\n    "), flush=True)


_PROJECTS: Final = ("shop", "a-compiler", "notes_2", "web.site", "Thesis", "x")


async def _other_client(url: str, model: str, seed: int) -> None:
    """A client that keeps the servers busy with prompts of its own."""
    chance, texts = random.Random(seed), library()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS)) as session:
        while True:
            text = chance.choice(texts)
            at = chance.randrange(max(len(text) - 8000, 1))
            messages = [{"role": "user", "content": text[at : at + chance.randrange(500, 8000)]}]
            body = {"model": model, "messages": messages, "max_tokens": 64}
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                    await response.read()
            await asyncio.sleep(chance.expovariate(2))


def _programs(root: Path, agent: Agent) -> Path:
    folder = agent.package.partition(":")[0]
    return root / "npm/node_modules/.bin" if folder == agent.package else root / folder / "bin"


def version(root: Path, agent: Agent) -> str:
    """The version of an agent; empty if it is not there."""
    folder, _, distribution = agent.package.partition(":")
    if distribution:
        found = [*(root / folder).glob(f"lib/python*/site-packages/{distribution}-*.dist-info")]
        return found[0].name.removesuffix(".dist-info").rpartition("-")[2] if found else ""
    about = root / "npm/node_modules" / agent.package / "package.json"
    return str(json.loads(about.read_text())["version"]) if about.exists() else ""


def found_agents(root: Path, only: Sequence[str]) -> list[str]:
    return [name for name, agent in AGENTS.items() if (not only or name in only) and version(root, agent)]


# The judgement


def judge(turns: Sequence[Turn], tokenizer: Tokenizer, block: int) -> None:
    """Set what of each prompt a server had: the longest part that it shares with one answered before it was sent."""
    for turn in turns:
        turn.tokens, turn.block = _rendered(turn, tokenizer), block
    for turn in turns:
        earlier = [one.tokens for one in turns if not one.problem and one.ended <= turn.sent and one is not turn]
        shared = max((_common(one, turn.tokens) for one in earlier), default=0)
        # The server's template may be another one, or its tokenizer.
        turn.expected = min(int(shared * turn.prompt / max(len(turn.tokens), 1)), max(turn.prompt - 1, 0))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _rendered(turn: Turn, tokenizer: Tokenizer) -> list[int]:
    dialect = next(one for one in DIALECTS.values() if turn.path.endswith(one.path))
    request = dialect.read(json.dumps(turn.body).encode(), _READ)
    return tokenizer.render_chat(
        template_messages(request.messages),
        tools=template_tools(request.tools),
        options=request.template_options,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )


def results(root: Path, turns: Sequence[Turn]) -> str:
    """A table with a row for each agent that sent something."""
    rows = []
    for name in (name for name in AGENTS if version(root, AGENTS[name])):
        mine = [turn for turn in turns if turn.client == re.sub(r"\W+", "-", name)]
        tools = [turn for turn in mine if turn.body.get("tools")] or mine
        if not tools:
            continue
        kind = tools[0].path.rpartition("/")[2].replace("completions", "chat")
        late = sum("compared as text" in turn.route for turn in mine)
        missed, moved = sum(turn.missed for turn in mine), sum(turn.moved for turn in mine)
        counted = (len(mine), missed, moved, sum(bool(turn.problem) for turn in mine), late)
        lengths = f"{tools[0].prompt:,} / {max(turn.prompt for turn in tools):,}"
        rows.append([f"{name} {version(root, AGENTS[name])}", kind, lengths, *map(str, counted)])
    head = ["agent", "dialect", "prompt tokens, first / longest", "requests", "missed", "sent elsewhere"]
    return table([*head, "refused", "without tokens"], rows)


def problems(turns: Sequence[Turn]) -> list[str]:
    """A line for each turn that missed or failed."""
    return [f"{turn}: {turn.problem or turn.shares}" for turn in turns if turn.problem or turn.missed]


def write_pages(found: str, recording: Path, measurements: Path = MEASUREMENTS, guide: Path = GUIDE) -> None:
    """Write the table of a run into its page, and that of `foreword traffic clients` into the guide, with the clients of which
    a new session misses something."""
    write_between(measurements, _MARK, found)
    tokenizer = Tokenizer.load(str(Path(foreword.__file__).parent / "models/stdlib-nano"))
    shares = client_report([recording], tokenizer, PromptOrder.parse((), ("profiles",)))
    write_between(guide, _MARK, clients_markdown([one for one in shares if one.where]))


def record(turns: Sequence[Turn], root: Path, path: Path) -> None:
    """Write whole requests for `foreword traffic clients`."""
    names = {re.sub(r"\W+", "-", name): f"{name} {version(root, agent)}" for name, agent in AGENTS.items()}
    with path.open("w", encoding="utf-8") as out:
        for turn in turns:
            line = {"client": names[turn.client], "session": turn.session, "path": turn.path, "body": turn.body}
            out.write(json.dumps(line, ensure_ascii=False) + "\n")


class VllmProcess(Process):
    """A `vllm serve` on a core of its own, with the connector over a folder, and KV events."""

    def __init__(self, folder: Path, name: str, python: str, model: Path, served: str) -> None:
        super().__init__(folder, name, [])
        limits = ("--kv-cache-memory-bytes", str(1 << 30), "--max-num-seqs", "8", "--dtype", "float32")
        told = ("--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
        where = ("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", served, "--enforce-eager")
        module = {"kv_connector": "ForewordConnector", "kv_connector_module_path": "foreword.integrations.vllm"}
        stored = {"store": [f"disk://{folder}/{name}?size=4GiB"]}
        connector = {**module, "kv_role": "kv_both", "kv_connector_extra_config": stored}
        # With a host in it, vLLM connects to an endpoint instead of binding it.
        places = {name: f"tcp://*:{free_port()}" for name in ("endpoint", "replay_endpoint")}
        events = {"enable_kv_cache_events": True, "publisher": "zmq", **places}
        cached = ("--kv-transfer-config", json.dumps(connector), "--kv-events-config", json.dumps(events))
        command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        self._command = [*command, *where, *limits, *told, *cached]

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            self._fail_if_ended()
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.5)
        raise SystemExit(f"{self.url} is not ready:\n{self.log.read_text()[-2000:]}")


@contextmanager
def fleet(given: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Path]]:
    """The URL of a router in front of servers, and the folder of their model."""
    model = folder / "model"
    make(replace(SIZES["tiny"], layers=2, heads=2, kv_heads=1), model, given.seed)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": CONTEXT}))
    names = [f"s{number}" for number in range(given.servers)]
    with ExitStack() as stack:
        started: list[Process] = []
        if given.vllm:
            started += [VllmProcess(folder, name, given.vllm, model, given.model_name) for name in names]
            os.environ["PYTHONPATH"] = str(_PAGES)  # the connector is imported from here
            for number, one in enumerate(started):
                os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(number % cores())
                stack.callback(one.stop)
                one.start()
            for one in started:
                one.wait_ready()
        else:
            flags = ["--served-model-name", given.model_name, "--kv-memory", "600000 tokens", "--dtype", "float32"]
            flags += ["--kv-events", "tcp://127.0.0.1:0"]
            started += stack.enter_context(servers(folder, names, str(model), *flags))
        routed = stack.enter_context(router(folder, started, *given.flags))
        yield routed.url, model


def read_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="of the router, behind --")
    parser.add_argument("--only", action="append", default=[], help="an agent; may be repeated")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=4, help="calls of tools in a session")
    parser.add_argument("--at-a-time", type=int, default=3, help="agents")
    parser.add_argument("--others", type=int, default=4, help="other clients")
    parser.add_argument("--seed", type=int, default=3, help="of weights, folders and other clients")
    parser.add_argument("--record", type=Path, help="whole requests")
    parser.add_argument("--write", action="store_true", help="the pages' tables")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter with vLLM")
    return parser.parse_args(given)


def main() -> int:
    given = read_arguments()
    given.model_name, root = "nano", given.folder.resolve()
    print(set_up(machine()), flush=True)
    with tempfile.TemporaryDirectory(prefix="foreword-agents-") as text:
        with fleet(given, Path(text)) as (url, model):
            turns = asyncio.run(run(given, root, url))
        judge(turns, Tokenizer.load(str(model)), 128 if given.vllm else 16)
        found, wrong = results(root, turns), problems(turns)
        print("\n".join([found, *wrong, *(f"{turn}, on purpose: {turn.shares}" for turn in turns if turn.moved)]))
        print(f"{len(turns)} requests, {sum(turn.missed for turn in turns)} missed a prefix that a server had")
        recording = given.record or Path(text) / "requests.jsonl"
        record(turns, root, recording)
        if given.write:
            write_pages(found, recording)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
