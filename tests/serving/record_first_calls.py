"""Records the first conversations of real clients with a Foreword server.

    python tests/serving/record_first_calls.py FOLDER [--only NAME]

FOLDER has the clients: `npm/node_modules` (@openai/codex, @anthropic-ai/claude-code, opencode-ai, cline, @continuedev/cli,
@mariozechner/pi-coding-agent, ai with its providers), and virtual environments `py` (openai, anthropic,
openai-agents, pydantic-ai-slim, langchain-openai, langchain-anthropic, langgraph, instructor, smolagents, mistralai, dspy),
`litellm`, `lm-eval` (lm-eval[api], transformers) and `aider`. A client that is not there is left out.

A relay stands between client and server. It shortens texts, so that conversations fit the small model and a fixture, and
records what it passes on: no keys, no names of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp import web
from first_calls import FOLDER, MODEL
from router_parts import Loop
from server_process import ServerProcess

_MODEL: Final = "stdlib-nano"
_HEADERS: Final = re.compile(
    r"accept|content-type|user-agent|anthropic-\S+|openai-beta|originator|x-stainless-(lang|package-version|helper-method)|x-app"
)
_TEXT, _DESCRIPTION, _TOOLS, _REQUESTS, _TOKENS = 160, 40, 8, 6, 16
_SECONDS: Final = 300.0
_LIMITS: Final = ("max_tokens", "max_output_tokens", "max_completion_tokens")


class Relay:
    """Passes requests on to a server and keeps them."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._private = re.compile("|".join(map(re.escape, (str(folder), os.uname().nodename, str(Path.home())))))
        self.requests: list[dict[str, Any]] = []
        self._loop = Loop()
        self.url: str = self._loop.call(self._start)

    async def _start(self) -> str:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        body = self.shortened(json.loads(data)) if data else None
        headers = {
            name.lower(): self._clean(value)
            for name, value in request.headers.items()
            if _HEADERS.fullmatch(name.lower())
        }
        kept = {"method": request.method, "path": request.path_qs, "headers": headers, "body": body}
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                request.method,
                self._url + request.path_qs,
                json=body if data else None,
                headers=headers,
                allow_redirects=False,
            ) as answer,
        ):
            self.requests.append({**kept, "status": answer.status})
            response = web.StreamResponse(
                status=answer.status, headers={"content-type": answer.headers.get("content-type", "text/plain")}
            )
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            return response

    def shortened(self, value: Any, name: str = "", depth: int = 0) -> Any:
        """The body with short texts, few tools of a kind, and a small limit of output."""
        if isinstance(value, dict):
            return {
                key: _TOKENS if key in _LIMITS and not depth else self.shortened(one, key, depth + 1)
                for key, one in value.items()
            }
        if isinstance(value, list):
            kept = value if name != "tools" else _some_tools(value)
            return [self.shortened(one, name, depth + 1) for one in kept]
        if isinstance(value, str):
            return self._clean(value)[: _DESCRIPTION if name == "description" else _TEXT]
        return value

    def _clean(self, text: str) -> str:
        text = self._private.sub("/home/user", text)
        text = re.sub(
            r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", f"{0:08}-0000-4000-8000-{0:012}", text
        )
        return re.sub(r"[0-9a-f]{32,}", "0" * 32, text)


def _some_tools(tools: list[Any]) -> list[Any]:
    """At least one of each type, and some of each."""
    kept, counts = [], dict[str, int]()
    for tool in tools:
        kind = tool.get("type", "") if isinstance(tool, dict) else ""
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= _TOOLS:
            kept.append(tool)
    return kept


@dataclass(frozen=True)
class Client:
    """A client: the command for its version, and that for a conversation, with a URL and a folder."""

    name: str
    version: list[str]
    command: Callable[[str, Path], list[str]]
    environment: Callable[[str, Path], dict[str, str]] = lambda url, folder: {}


_TOOL = 'def weather(city: str) -> str:\n    "The weather in a city."\n    return "sunny in " + city\n'
_PYTHON: dict[str, tuple[str, str]] = {
    "OpenAI SDK": (
        "openai",
        """
import openai
c = openai.OpenAI(base_url=URL + "/v1", api_key="none")
ask = [{"role": "user", "content": "Say hi."}]
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
c.models.list()
c.chat.completions.create(model=M, messages=ask, max_tokens=8)
made = c.chat.completions.create(model=M, messages=ask, tools=[tool], tool_choice="required", max_tokens=60)
list(c.chat.completions.create(model=M, messages=ask, stream=True, stream_options={"include_usage": True}, max_tokens=8))
first = c.responses.create(model=M, input="Say hi.", max_output_tokens=16)
with c.responses.stream(model=M, input=ask, max_output_tokens=16) as s:
    list(s)
""",
    ),
    "Anthropic SDK": (
        "anthropic",
        """
import anthropic
c = anthropic.Anthropic(base_url=URL, api_key="none")
ask = [{"role": "user", "content": "Say hi."}]
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tool = {"name": "weather", "input_schema": schema}
c.messages.create(model=M, max_tokens=8, messages=ask)
c.messages.create(model=M, max_tokens=60, messages=ask, tools=[tool], tool_choice={"type": "any"})
with c.messages.stream(model=M, max_tokens=8, messages=ask, system="Be brief.") as s:
    s.get_final_message()
c.messages.count_tokens(model=M, messages=ask)
tools = [anthropic.beta_tool(weather)]
any_tool = {"type": "any"}
list(c.beta.messages.tool_runner(model=M, max_tokens=60, messages=ask, tools=tools, tool_choice=any_tool, max_iterations=2))
""",
    ),
    "OpenAI Agents SDK": (
        "openai-agents",
        """
import agents, openai
agents.set_tracing_disabled(True)
c = openai.AsyncOpenAI(base_url=URL + "/v1", api_key="none")
tools = [agents.function_tool(weather)]
for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
    a = agents.Agent(name="helper", instructions="You know the weather.", tools=tools, model=kind(model=M, openai_client=c))
    agents.Runner.run_sync(a, "How is it in Oslo?", max_turns=2)
""",
    ),
    "pydantic-ai": (
        "pydantic-ai-slim",
        """
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
o = OpenAIProvider(base_url=URL + "/v1", api_key="none")
a = AnthropicProvider(base_url=URL, api_key="none")
for m in (OpenAIChatModel(M, provider=o), OpenAIResponsesModel(M, provider=o), AnthropicModel(M, provider=a)):
    agent = Agent(m, tools=[weather], instructions="Be brief.", model_settings={"max_tokens": 16})
    agent.run_sync("How is it in Oslo?")
""",
    ),
    "LangChain": (
        "langchain-openai",
        """
from langchain_openai import ChatOpenAI
from langchain_anthropic import ChatAnthropic
o = ChatOpenAI(base_url=URL + "/v1", api_key="none", model=M, max_tokens=16)
o.invoke("Say hi.")
list(o.stream("Say hi."))
o.bind_tools([weather]).invoke("How is it in Oslo?")
ChatAnthropic(base_url=URL, api_key="none", model=M, max_tokens=16).bind_tools([weather]).invoke("How is it in Oslo?")
""",
    ),
    "LangGraph": (
        "langgraph",
        """
from langgraph.prebuilt import create_react_agent
from langchain_openai import ChatOpenAI
ask = {"messages": [("user", "How is it in Oslo?")]}
where = {"base_url": URL + "/v1", "api_key": "none", "model": M, "max_tokens": 16}
create_react_agent(ChatOpenAI(**where), [weather], prompt="Be brief.").invoke(ask)
create_react_agent(ChatOpenAI(**where, use_responses_api=True), [weather]).invoke(ask)
""",
    ),
    "instructor": (
        "instructor",
        """
import anthropic, instructor, openai, pydantic
class Person(pydantic.BaseModel):
    name: str
ask = {"messages": [{"role": "user", "content": "Who?"}], "response_model": Person, "max_retries": 0}
o = openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0)
a = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
for client in (
    instructor.from_openai(o, mode=instructor.Mode.TOOLS),
    instructor.from_openai(o, mode=instructor.Mode.JSON_SCHEMA),
    instructor.from_anthropic(a, mode=instructor.Mode.ANTHROPIC_TOOLS),
):
    try:
        client.create(model=M, max_tokens=16, **ask)
    except Exception as error:
        print(type(error))
""",
    ),
    "smolagents": (
        "smolagents",
        """
from smolagents import CodeAgent, OpenAIServerModel, Tool, ToolCallingAgent
class Weather(Tool):
    name, description, output_type = "weather_in", "The weather in a city.", "string"
    inputs = {"city": {"type": "string", "description": "its name"}}
    def forward(self, city: str) -> str:
        return "sunny"
m = OpenAIServerModel(model_id=M, api_base=URL + "/v1", api_key="none", max_tokens=16)
for agent in (ToolCallingAgent(tools=[Weather()], model=m, max_steps=1), CodeAgent(tools=[], model=m, max_steps=1)):
    try:
        agent.run("How is it in Oslo?")
    except Exception as error:
        print(type(error))
""",
    ),
    "Mistral SDK": (
        "mistralai",
        """
from mistralai.client import Mistral
c = Mistral(server_url=URL, api_key="none")
ask = [{"role": "user", "content": "Say hi."}]
parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
c.chat.complete(model=M, messages=ask, max_tokens=8)
list(c.chat.stream(model=M, messages=ask, max_tokens=8))
c.chat.complete(model=M, messages=ask, max_tokens=16, tools=[tool])
""",
    ),
}
_PYTHON["DSPy"] = (
    "dspy",
    """
import dspy
lm = dspy.LM("openai/" + M, api_base=URL + "/v1", api_key="none", max_tokens=16, cache=False, num_retries=0)
dspy.configure(lm=lm)
lm("Say hi.", n=2, logprobs=True)
for adapter in (dspy.ChatAdapter(), dspy.JSONAdapter()):
    try:
        with dspy.context(adapter=adapter):
            dspy.Predict("question -> answer: int")(question="How many?")
    except Exception as error:
        print(type(error))
""",
)
_LM_EVAL = f"""
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
for ids in (True, False):
    lm = LocalCompletionsAPI(
        base_url=URL + "/v1/completions", model=M, tokenizer={str(MODEL)!r}, tokenizer_backend="huggingface",
        tokenized_requests=ids, max_length=512,
    )
    pairs = [("def area(", "radius):"), ("import ", "os")]
    lm.loglikelihood([Instance("loglikelihood", {{}}, pair, 0) for pair in pairs])
    lm.generate_until([Instance("generate_until", {{}}, ("def area(", {{"until": ["\\n"], "max_gen_toks": 8}}), 0)])
"""
_AI_SDK = """
import {generateText, streamText, tool, jsonSchema, stepCountIs} from "ai";
import {createOpenAI} from "@ai-sdk/openai";
import {createAnthropic} from "@ai-sdk/anthropic";
import {createOpenAICompatible} from "@ai-sdk/openai-compatible";
const o = createOpenAI({baseURL: URL + "/v1", apiKey: "none"});
const inputSchema = jsonSchema({type: "object", properties: {city: {type: "string"}}, required: ["city"]});
const weather = tool({description: "The weather in a city.", inputSchema, execute: async ({city}) => "sunny in " + city});
const tools = {weather};
const common = {system: "Be brief.", prompt: "How is it in Oslo?", maxOutputTokens: 16, maxRetries: 0};
await generateText({...common, model: o.chat(M), tools, stopWhen: stepCountIs(2)});
await generateText({...common, model: o.responses(M), tools, stopWhen: stepCountIs(2)});
await generateText({...common, model: createAnthropic({baseURL: URL + "/v1", apiKey: "none"})(M), tools});
await streamText({...common, model: createOpenAICompatible({name: "fw", baseURL: URL + "/v1"})(M)}).text;
"""
_CODEX = (
    *("exec", "--skip-git-repo-check", "-c", "model_provider=fw", "-c", 'model_providers.fw.name="fw"'),
    *("-c", 'model_providers.fw.wire_api="responses"', "-m", _MODEL),
)
_CLINE = """
{0} auth -p openai-compatible -k none -m {2} -b {1}/v1
{0} -P openai-compatible -m {2} -t 60 --retries 1 'Say hi.'
"""
_LITELLM = """
import json, os, subprocess, sys, time, urllib.request, openai
params = {"model": "openai/" + M, "api_base": URL + "/v1", "api_key": "none"}
with open("config.yaml", "w") as f:
    json.dump({"model_list": [{"model_name": "nano", "litellm_params": params}]}, f)
program = os.path.dirname(sys.executable) + "/litellm"
os.environ.update(LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY="true", LITELLM_LOCAL_MODEL_COST_MAP="True")
proxy = subprocess.Popen([program, "--config", "config.yaml", "--port", "27999", "--host", "127.0.0.1"])
try:
    for _ in range(500):
        try:
            urllib.request.urlopen("http://127.0.0.1:27999/health/liveliness"); break
        except OSError:
            time.sleep(0.5)
    c = openai.OpenAI(base_url="http://127.0.0.1:27999/v1", api_key="none", max_retries=0)
    ask = [{"role": "user", "content": "Say hi."}]
    c.chat.completions.create(model="nano", messages=ask, max_tokens=8)
    list(c.chat.completions.create(model="nano", messages=ask, max_tokens=8, stream=True))
    try:
        c.responses.create(model="nano", input="Say hi.", max_output_tokens=16)
    except Exception as error:
        print(error)
finally:
    proxy.terminate(); proxy.wait()
"""


def _clients(root: Path) -> list[Client]:
    npm = root / "npm/node_modules"

    def python(environment: str, package: str, script: str) -> Client:
        program = str(root / environment / "bin/python")
        version = [program, "-c", f"import importlib.metadata as m; print(m.version({package!r}))"]
        return Client("", version, lambda url, folder: [program, "-c", f"URL, M = {url!r}, {_MODEL!r}\n{script}"])

    def tool(name: str) -> str:
        return str(npm / ".bin" / name)

    def opencode(url: str, folder: Path) -> dict[str, str]:
        provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1", "apiKey": "none"}}
        config = {"provider": {"fw": {**provider, "models": {_MODEL: {"limit": {"context": 200_000, "output": 16}}}}}}
        (folder / "opencode.json").write_text(json.dumps(config))
        return {}

    def pi(url: str, folder: Path) -> dict[str, str]:
        model = {"id": _MODEL, "contextWindow": 200_000, "maxTokens": _TOKENS}
        provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "none", "models": [model]}
        (folder / ".pi/agent").mkdir(parents=True)
        (folder / ".pi/agent/models.json").write_text(json.dumps({"providers": {"fw": provider}}))
        return {}

    def continued(url: str, folder: Path) -> dict[str, str]:
        model = {"name": "m", "provider": "openai", "model": _MODEL, "apiBase": f"{url}/v1", "apiKey": "none"}
        config = {"name": "x", "version": "1.0.0", "schema": "v1", "models": [{**model, "roles": ["chat"]}]}
        (folder / "config.yaml").write_text(json.dumps(config))
        return {}

    found = [
        Client(
            "pi",
            [tool("pi"), "--version"],
            lambda url, folder: [tool("pi"), "--provider", "fw", "--model", _MODEL, "-p", "Say hi."],
            pi,
        ),
        Client(
            "Continue",
            [tool("cn"), "--version"],
            lambda url, folder: [tool("cn"), "--config", "config.yaml", "-p", "Say hi."],
            continued,
        ),
        Client(
            "Codex CLI",
            [tool("codex"), "--version"],
            lambda url, folder: [tool("codex"), *_CODEX, "-c", f'model_providers.fw.base_url="{url}/v1"', "Say hi."],
        ),
        Client(
            "Claude Code",
            [tool("claude"), "--version"],
            lambda url, folder: [tool("claude"), "-p", "Say hi.", "--model", _MODEL],
            lambda url, folder: {
                "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_API_KEY": "none",
                "ANTHROPIC_SMALL_FAST_MODEL": _MODEL,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_AUTOUPDATER": "1",
            },
        ),
        Client(
            "opencode",
            [tool("opencode"), "--version"],
            lambda url, folder: [tool("opencode"), "run", "-m", f"fw/{_MODEL}", "Say hi."],
            opencode,
        ),
        Client(
            "Cline",
            [tool("cline"), "--version"],
            lambda url, folder: ["sh", "-c", _CLINE.format(tool("cline"), url, _MODEL)],
        ),
        Client(
            "aider",
            [str(root / "aider/bin/aider"), "--version"],
            lambda url, folder: [
                *(str(root / "aider/bin/aider"), "--model", f"openai/{_MODEL}", "--message", "Say hi.", "--yes-always"),
                *(
                    "--no-git",
                    "--no-check-update",
                    "--no-show-model-warnings",
                    "--analytics-disable",
                    "--map-tokens",
                    "0",
                ),
            ],
            lambda url, folder: {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none"},
        ),
        Client(
            "AI SDK",
            ["node", "-p", f"require('{npm}/ai/package.json').version"],
            lambda url, folder: ["sh", "-c", f'cd {root}/npm && node --input-type=module -e "$SCRIPT"'],
            lambda url, folder: {"SCRIPT": f"const URL = {url!r}, M = {_MODEL!r};{_AI_SDK}"},
        ),
    ]
    scripts = {name: ("py", package, _TOOL + script) for name, (package, script) in _PYTHON.items()}
    scripts["LiteLLM proxy"] = ("litellm", "litellm", _LITELLM)
    scripts["lm-eval"] = ("lm-eval", "lm_eval", _LM_EVAL)
    for name, given in scripts.items():
        made = python(*given)
        found.append(Client(name, made.version, made.command))
    return found


def record(client: Client, server: str) -> list[dict[str, Any]]:
    """The requests of its first conversation, shortened."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        relay = Relay(server, folder)
        environment = {
            **os.environ,
            "HOME": name,
            "PWD": name,
            "NO_COLOR": "1",
            **client.environment(relay.url, folder),
        }
        try:
            done = subprocess.run(
                client.command(relay.url, folder), cwd=name, env=environment, stdin=subprocess.DEVNULL,
                capture_output=True, timeout=_SECONDS, check=False,
            )  # fmt: skip
            print(f"  rc {done.returncode}: {done.stdout[-200:]!r} {done.stderr[-300:]!r}")
        except subprocess.TimeoutExpired:
            print("  it did not end")
    return relay.requests[:_REQUESTS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", default=[])
    given = parser.parse_args()
    server = ServerProcess("--dtype", "float32", "--no-self-check")
    try:
        url = server.wait_ready()
        for client in _clients(given.folder.resolve()):
            if given.only and client.name not in given.only:
                continue
            said = subprocess.run(client.version, capture_output=True, text=True, check=False)
            version = re.search(r"\d+(\.\d+)+", said.stdout or said.stderr)
            if version is None:
                print(f"{client.name}: not here: {said.stderr[-200:]}")
                continue
            print(f"{client.name} {version[0]}", flush=True)
            requests = record(client, url)
            print("  " + ", ".join(f"{one['method']} {one['path']} {one['status']}" for one in requests), flush=True)
            if requests:
                made = {"client": client.name, "version": version[0], "requests": requests}
                path = FOLDER / f"{client.name.replace(' ', '-').lower()}.json"
                path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    finally:
        server.kill()


if __name__ == "__main__":
    sys.exit(main())
