"""`benchmarks.router.agents` works: its relay, its scripted answers, its judgement, and the tables that it writes.

The agents themselves are programs of others. Here a small one speaks each dialect, and an SDK of this
environment runs as it is.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from router_parts import RouterThread
from shared_server import SharedServer, SharedServers

import foreword
from foreword.tokens.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
MODEL = Path(foreword.__file__).parent / "models" / "stdlib-nano"
TURNS = 2
# An agent: it asks, runs the calls that it gets, and ends with a text. URL, M and ASK are its address, model and question.
_SMALL = """
import json, os, urllib.request
RULES = "You read files. " * 30
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
def post(path, body):
    head = {"content-type": "application/json"}
    asked = urllib.request.Request(URL + path, json.dumps({"model": M, **body}).encode(), head)
    return json.load(urllib.request.urlopen(asked))
def read(arguments):
    return open(arguments["path"]).read()
"""
_DIALECTS = {
    "chat": """
said = [{"role": "system", "content": f"Working directory: {os.getcwd()}. {RULES}"}, {"role": "user", "content": ASK}]
tools = [{"type": "function", "function": {"name": "read_file", "parameters": SCHEMA}}]
while True:
    answer = post("/v1/chat/completions", {"messages": said, "tools": tools, "max_tokens": 500})
    found = answer["choices"][0]["message"]
    said.append(found)
    if not found.get("tool_calls"):
        break
    for call in found["tool_calls"]:
        text = read(json.loads(call["function"]["arguments"]))
        said.append({"role": "tool", "tool_call_id": call["id"], "content": text})
""",
    "responses": """
said = [{"role": "user", "content": ASK}]
tools = [{"type": "function", "name": "read_file", "parameters": SCHEMA}]
while True:
    answer = post("/v1/responses", {"instructions": RULES, "input": said, "tools": tools, "store": False})
    said += answer["output"]
    calls = [one for one in answer["output"] if one["type"] == "function_call"]
    if not calls:
        break
    for call in calls:
        text = read(json.loads(call["arguments"]))
        said.append({"type": "function_call_output", "call_id": call["call_id"], "output": text})
""",
    "messages": """
said = [{"role": "user", "content": ASK}]
tools = [{"name": "read_file", "input_schema": SCHEMA}]
while True:
    answer = post("/v1/messages", {"system": RULES, "messages": said, "tools": tools, "max_tokens": 500})
    said.append({"role": "assistant", "content": answer["content"]})
    calls = [one for one in answer["content"] if one["type"] == "tool_use"]
    if not calls:
        break
    results = [{"type": "tool_result", "tool_use_id": one["id"], "content": read(one["input"])} for one in calls]
    said.append({"role": "user", "content": results})
""",
}


@pytest.fixture(scope="module")
def agents() -> Iterator[ModuleType]:
    sys.path.append(str(ROOT))
    yield importlib.import_module("benchmarks.router.agents")
    sys.path.remove(str(ROOT))


def programs(folder: Path, **versions: str) -> Path:
    """A folder of agents: this interpreter, with packages of these versions."""
    runs = folder / "py" / "bin" / "python"
    runs.parent.mkdir(parents=True)
    runs.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    runs.chmod(0o755)
    for package, version in versions.items():
        (folder / f"py/lib/python3/site-packages/{package}-{version}.dist-info").mkdir(parents=True)
    return folder


@contextmanager
def small_agents(agents: ModuleType) -> Iterator[None]:
    """The only agents that there are: one for each dialect."""
    made = {name: agents.Agent("py:small", agents._script(_SMALL + text)) for name, text in _DIALECTS.items()}
    with mock.patch.dict(agents.AGENTS, made, clear=True):
        yield


def turns_of(agents: ModuleType, root: Path, server: SharedServer, *flags: str) -> list[Any]:
    """The turns of the agents of a folder at a router in front of a server, judged."""
    given = agents.read_arguments([str(root), "--others", "0", "--turns", str(TURNS), *flags])
    given.model_name = server.model
    router = RouterThread("--replica", server.url).wait_for(1)
    try:
        turns = asyncio.run(agents.run(given, root, router.url))
    finally:
        router.kill()
    agents.judge(turns, Tokenizer.load(str(MODEL)), 16)
    return list(turns)


@pytest.fixture(scope="module")
def small_turns(
    agents: ModuleType, shared: SharedServers, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Sequence[Any]]:
    """The small agents' folder, and their turns."""
    root = programs(tmp_path_factory.mktemp("agents"), small="1.0")
    with small_agents(agents):
        return root, turns_of(agents, root, shared.open)


@pytest.fixture
def worked(agents: ModuleType, small_turns: tuple[Path, Sequence[Any]]) -> Iterator[tuple[Path, Sequence[Any]]]:
    """The folder and turns of `small_turns`, whose agents are known meanwhile."""
    with small_agents(agents):
        yield small_turns


def test_agents_of_every_dialect_work_and_hit_what_a_server_had(
    agents: ModuleType, worked: tuple[Path, Sequence[Any]]
) -> None:
    """Two sessions of each agent get calls by script, run them, and send the results on until they get a text. Every request is
    answered, and every later turn of a session has all of the turn before, of which a server had more than nothing."""
    root, turns = worked
    assert agents.problems(turns) == []
    for name in _DIALECTS:
        for session in ("1", "2"):
            mine = [one for one in turns if (one.client, one.session) == (name, session)]
            assert len(mine) == TURNS + 1 and all(one.route for one in mine)
            for before, one in itertools.pairwise(mine):
                assert one.expected >= before.prompt - 32 and one.cached >= one.expected - 32
                assert f"This is file {mine.index(one) - 1} of " in json.dumps(one.body)
    rows = agents.results(root, turns).splitlines()[2:]
    assert [row.split("|")[1].split()[0] for row in rows] == list(_DIALECTS)
    assert all([cell.strip() for cell in row.split("|")[4:8]] == ["6", "0", "0", "0"] for row in rows)


def test_a_turn_that_has_less_is_named(agents: ModuleType, worked: tuple[Path, Sequence[Any]]) -> None:
    """A turn with less than a server had is missed, unless the decision shows that the router knew of what the next server has;
    one that was refused failed. Each of these is named and counted, and no other."""
    root, turns = worked
    last = {name: next(one for one in reversed(turns) if one.client == name) for name in _DIALECTS}
    prompt, expected = last["chat"].prompt, last["chat"].expected
    worse = "http://a: session moved, 1.1 s (1.0 computing {0} of {0} tokens); "
    worse += "next http://b at 2.9 s (2.8 queued, 0.1 computing {1} of {0} tokens)"
    instead: dict[int, dict[str, Any]] = {
        id(last["chat"]): {"cached": 0, "route": worse.format(prompt, prompt - expected // 2)},
        id(last["responses"]): {"cached": 0, "route": worse.format(last["responses"].prompt, 16)},
        id(last["messages"]): {"problem": "500 no"},
    }
    changed = [replace(one, **instead.get(id(one), {})) for one in turns]
    first, second = agents.problems(changed)
    assert {first.split()[0], second.split()[0]} == {"chat", "messages"} and "500 no" in first + second
    rows = {
        row.split()[1]: [cell.strip() for cell in row.split("|")[5:8]]
        for row in agents.results(root, changed).splitlines()[2:]
    }
    assert rows == {"chat": ["1", "0", "0"], "responses": ["0", "1", "0"], "messages": ["0", "0", "1"]}


def test_the_pages_tables_are_what_the_command_writes(
    agents: ModuleType, worked: tuple[Path, Sequence[Any]], tmp_path: Path
) -> None:
    """`--write` replaces the tables of both pages between their marks, and nothing else: a row for each agent of the run, and
    in the guide for those of which a new session misses something, as where the system prompt names the folder."""
    root, turns = worked
    recording, pages = tmp_path / "requests.jsonl", [agents.MEASUREMENTS, agents.GUIDE]
    agents.record(turns, root, recording)
    copies = [tmp_path / page.name for page in pages]
    for page, copy in zip(pages, copies, strict=True):
        copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    agents.write_pages(agents.results(root, turns), recording, *copies)
    begin, end = (f"<!-- Written by benchmarks.router.agents: {word} -->" for word in ("begin", "end"))
    for page, copy in zip(pages, copies, strict=True):
        (before, old, after), (same, new, rest) = (_parts(one, begin, end) for one in (page, copy))
        assert (before, after) == (same, rest)
        assert old.split("\n")[0].split() == new.split("\n")[0].split()  # the head
        rows = [row.split("|")[1].strip() for row in new.splitlines()[2:]]
        assert rows == [f"{name} 1.0" for name in (_DIALECTS if page is agents.MEASUREMENTS else ("chat",))]


def _parts(page: Path, begin: str, end: str) -> tuple[str, str, str]:
    """The text before the table of a page, the table, and the text behind it."""
    before, found = page.read_text(encoding="utf-8").split(begin)
    table, after = found.split(end)
    return before, table.strip(), after


def test_every_agent_is_told_the_relays_address(agents: ModuleType, tmp_path: Path) -> None:
    """The command, the environment or a file in the folder of each agent names the relay and the model, and what is written as
    JSON is JSON."""
    for number, (name, agent) in enumerate(agents.AGENTS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = agent.command(tmp_path, "http://relay:1/x/1", folder, "the-model")
        files = [path.read_text() for path in folder.rglob("*") if path.is_file()]
        told = " ".join([*command, *agent.environment("http://relay:1/x/1", "the-model").values(), *files])
        assert "http://relay:1/x/1" in told and "the-model" in told, name
        assert all(isinstance(json.loads(text), dict) for text in files), name


@pytest.mark.extended
@pytest.mark.parametrize("name", ["OpenAI Agents SDK, responses", "OpenAI Agents SDK, chat"])
def test_an_sdk_works_as_it_is(agents: ModuleType, server: SharedServer, tmp_path: Path, name: str) -> None:
    """An agent of the benchmark that this environment has, streamed and whole: it runs to its end, and no turn misses."""
    root = programs(tmp_path, openai_agents=metadata.version("openai-agents"))
    with mock.patch.dict(os.environ, {"OPENAI_API_KEY": "none"}):
        turns = turns_of(agents, root, server, "--only", name)
    assert len(turns) == 2 * (TURNS + 1) and agents.problems(turns) == []
