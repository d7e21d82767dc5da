"""Other orders of prompts: what one would give each client of a recording."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from foreword.cli.main import app as commands

RULES = "\n".join(f"Rule {number}: read before you write." for number in range(30))


def body(folder: str) -> dict[str, Any]:
    """The first request of an agent in a folder."""
    system = f"You are opencode.\n{RULES}\n  Working directory: /home/{folder}\n  Platform: linux\n{RULES}"
    function = {
        "name": "read",
        "description": "Reads a file. " * 20,
        "parameters": {"type": "object", "properties": {}},
    }
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Work in {folder}."}]
    return {"model": "m", "messages": messages, "tools": [{"type": "function", "function": function}]}


def test_what_each_client_gains(tmp_path: Path) -> None:
    """`foreword traffic clients` shows the cached share of next turns and of new sessions, as they come and in the order, and
    why a new session misses. A request that is none of a chat is named with its line."""
    path = tmp_path / "requests.jsonl"
    lines = list[dict[str, Any]]()
    for folder in ("alpha", "zulu"):
        first = body(folder)
        more = [{"role": "assistant", "content": "I do."}, {"role": "user", "content": "Go on."}]
        for request in (first, {**first, "messages": [*first["messages"], *more]}):
            lines.append({"client": "opencode 1", "session": folder, "path": "/v1/chat/completions", "body": request})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = CliRunner().invoke(commands, ["traffic", "clients", str(path), "--json"])
    assert found.exit_code == 0, found.output
    [client] = json.loads(found.stdout)
    assert (client["sessions"], client["requests"]) == (2, 4)
    assert client["new_session"] < 0.5 < 0.85 < client["new_session_ordered"]
    assert min(client["next_turn"], client["next_turn_ordered"]) > 0.85
    assert client["where"].startswith("messages[0].content line") and "another system prompt" in client["advice"]
    table = CliRunner().invoke(commands, ["traffic", "clients", str(path), "--markdown"]).stdout
    assert table.startswith("| Client | prompt tokens |") and "| opencode 1 |" in table
    path.write_text(json.dumps({"client": "x", "path": "/v1/images", "body": {}}))
    wrong = CliRunner().invoke(commands, ["traffic", "clients", str(path)])
    assert wrong.exit_code != 0 and "line 1" in str(wrong.exception)
