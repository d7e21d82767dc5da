"""The command line."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer
from example_counts import represented
from typer.main import get_command
from typer.testing import CliRunner

from foreword import __version__
from foreword.cli import demo
from foreword.cli import main as cli
from foreword.cli.doctor import examine
from foreword.cli.flags import config_flags, with_config
from foreword.config import keys_of
from foreword.configuration import Config
from foreword.engine_config import EngineConfig
from foreword.errors import ConfigError
from foreword.store.data_keys import DataKeys
from foreword.store_config import EncryptionConfig

runner = CliRunner()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FOREWORD_")]:
        monkeypatch.delenv(name)


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["foreword", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def seen_config(*arguments: str) -> Config:
    """The configuration that a command with these arguments gets."""
    seen: list[Config] = []
    app = typer.Typer()
    app.command()(with_config(lambda config: seen.append(config)))
    result = runner.invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_help_is_light() -> None:
    """`foreword --help` imports neither torch nor the web framework."""
    heavy = "torch transformers aiohttp httpx prometheus_client"
    code = f"import sys, foreword.cli.main; print([name for name in '{heavy}'.split() if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
    shown = subprocess.run([sys.executable, "-m", "foreword", "--help"], capture_output=True, text=True)
    assert shown.returncode == 0 and "serve" in shown.stdout and "doctor" in shown.stdout


def test_every_key_has_a_flag_with_a_description() -> None:
    """Each configuration key is a flag of `serve` (the model is the argument) or of `route` (replicas go by `--replica`), and
    its help is the docstring's. Master keys are no flags. Each secret key has a second one for the file that contains it,
    whatever sections and secrets there are."""
    shown = "".join(
        runner.invoke(cli.app, [command, "--help-all"], terminal_width=200).output for command in ("serve", "route")
    )
    flags = list(config_flags())
    files = {(flag.section, flag.file_of): flag for flag in flags if flag.file_of}
    own = {f"{flag.section}.{flag.key}" for flag in flags if not flag.file_of}
    for flag in flags:
        if flag.secret:
            names = {f"{flag.section}.{flag.key}_file", f"{flag.section}.{flag.key.removesuffix('s')}_file"}
            assert (flag.section, flag.key) in files or names & own, f"{flag.section}.{flag.key} has no file"
    assert len(flags) - len(files) == sum(
        len(keys_of(type(getattr(Config(), section.name)))) for section in dataclasses.fields(Config)
    )
    for flag in flags:
        assert flag.text, f"{flag.section}.{flag.key} has no description in its class's docstring"
        assert flag.key in ("model", "replicas") or (f"--{flag.name} " in shown) == flag.offered


def test_a_flag_has_one_meaning() -> None:
    """A flag of several commands takes the same kind of value in each: a switch here is no file there. Numbers may differ in
    what they count: whole ones in one command, any in another."""
    kinds: dict[str, dict[str, list[str]]] = {}
    commands = [("foreword", typer.main.get_command(cli.app))]
    for path, command in commands:
        with command.context_class(command, info_name=path) as context:
            for one in command.params:
                if one.param_type_name == "option" and (record := one.get_help_record(context)) is not None:
                    # Such as `--seed <int>`, `--store <list[str]>`; other versions of typer write `--seed INTEGER`.
                    shown = re.search(r" <?(?:list\[)?([A-Za-z]+)", record[0].rpartition("--")[2])
                    kind = "switch" if shown is None else shown[1].lower()
                    kind = {"int": "number", "integer": "number", "float": "number", "str": "text"}.get(kind, kind)
                    for name in (*one.opts, *one.secondary_opts):
                        kinds.setdefault(name, {}).setdefault(kind, []).append(path)
        commands += [(f"{path} {name}", child) for name, child in getattr(command, "commands", {}).items()]
    assert len(commands) > 30 and len(kinds["--json"]["switch"]) > 5
    assert {name: places for name, places in kinds.items() if len(places) > 1} == {}


def test_the_configuration_that_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`foreword config` names the place of each value that is not a default, with all places given; it shows no secret, and no
    password of a URL."""
    path, key = tmp_path / "f.toml", tmp_path / "key"
    path.write_text(
        '[server]\nport = 1\nhost = "127.0.0.2"\ntenant_secret = "sixteen characters, quiet"\n', encoding="utf-8"
    )
    key.write_text("an admin key, quiet too")
    monkeypatch.setenv("FOREWORD_SERVER_PORT", "2")
    monkeypatch.setenv("FOREWORD_SERVER_LOG_FORMAT", "json")
    given = ["a/model", "--config", str(path), "--log-format", "text", "--admin-key-file", str(key)]
    given += ["--store", "redis://me:quiet@host/0", "--store", "memory://?size=1GiB"]
    shown = runner.invoke(cli.app, ["config", "serve", *given, "--json"])
    assert shown.exit_code == 0, shown.output
    assert {name: (one["value"], one["from"]) for name, one in json.loads(shown.output).items()} == {
        "engine.model": ("a/model", "MODEL"),
        "server.host": ("127.0.0.2", f"[server] in {path}"),
        "server.port": (2, "FOREWORD_SERVER_PORT"),
        "server.log_format": ("text", "--log-format"),
        "server.tenant_secret": ("(not shown)", f"[server] in {path}"),
        "server.admin_key_file": (str(key), "--admin-key-file"),
        "store.urls": (["redis://***@host/0", "memory://?size=1GiB"], "--store"),
    }
    every = runner.invoke(cli.app, ["config", "serve", *given, "--all"]).output
    assert re.search(r"^engine\.block_size +16 +default$", every, re.MULTILINE) and "quiet" not in every
    routed = runner.invoke(cli.app, ["config", "route", "--replica", "http://a:1", "--json"])
    assert {*json.loads(routed.output)} == {"router.replicas", "server.port", "server.log_format"}
    traced = ["config", "route", "--replica", "http://a:1", "--otlp-endpoint", "http://me:quiet@collector:4318"]
    assert json.loads(runner.invoke(cli.app, [*traced, "--json"]).output)["server.otlp_endpoint"]["value"] == (
        "http://***@collector:4318"
    )
    wrong = runner.invoke(cli.app, ["config", "serve", "--block-size", "0"])
    assert wrong.exit_code != 0
    for refused in (["--replica", "http://a:1", "--replica", "http://a:1"], ["--replica", "http://me:quiet@a:1"], []):
        found = runner.invoke(cli.app, ["config", "route", *refused])
        assert isinstance(found.exception, ConfigError) and "quiet" not in found.output + found.exception.message


def test_flags_reach_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags of every type arrive in their section, over the environment, over the file."""
    path = tmp_path / "f.toml"
    path.write_text("[engine]\nblock_size = 8\nthreads = 3\nmax_num_seqs = 5\n", encoding="utf-8")
    monkeypatch.setenv("FOREWORD_ENGINE_THREADS", "4")
    monkeypatch.setenv("FOREWORD_ENGINE_BLOCK_SIZE", "64")
    flags = ["--block-size", "32", "--no-self-check", "--reserve", "0.5", "--prefix-budget", "1GiB", "--port", "0"]
    keys = ["--api-keys", "a=one", "--api-keys", "b=two"]
    config = seen_config("some/model", "--config", str(path), *flags, *keys)
    engine = EngineConfig(model="some/model", block_size=32, threads=4, max_num_seqs=5, self_check=False, reserve=0.5)
    assert config.engine == engine
    assert config.server.api_keys == ("a=one", "b=two") and config.server.port == 0
    assert config.prefixes.budget == "1GiB"


def test_no_flags_are_the_defaults() -> None:
    """Without flags the configuration is the default one."""
    assert seen_config() == Config()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["serve", "--blok-size", "3"], "--block-size"),
        (["serve", "--block-size", "x"], "--block-size"),
        (["serve", "--block-size", "0"], "engine.block_size must be at least 1"),
        (["serve", "--config", "/nonexistent.toml"], "/nonexistent.toml"),
        (["serve", "--store-staging", "x"], "--store-staging"),
        (["verify", "foo"], "write for example disk:///"),
        (["verify", "foo:///x"], "'unix'"),
        (["inspect", "memory://"], "a memory:// store is in the memory of its server"),
        (["srve"], "serve"),
        (["prefix", "add", "x"], "exactly one of --text, --file and --messages"),
        (["prefix", "add", "x", "--text", "a", "--file", "b"], "exactly one"),
        (["prefix", "add", "x", "--file", "/nonexistent"], "/nonexistent"),
        (["prefix", "list", "--server", "http://127.0.0.1:9"], "no answer from http://127.0.0.1:9"),
        (["prefix", "list", "--server", "nonsense"], "nonsense"),
    ],
)
def test_mistakes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    """A mistake of the caller is status 2 and a sentence on stderr that says what would be right."""
    assert run_main(monkeypatch, *arguments) == 2
    captured = capfd.readouterr()
    assert sentence in captured.err and "Traceback" not in captured.err and captured.out == ""


def test_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`--version` prints the version."""
    assert run_main(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"foreword {__version__}\n"


def test_shell_completion() -> None:
    """`--install-completion` exists, and the shell's completion knows the commands."""
    shown = runner.invoke(cli.app, ["--help"], terminal_width=200).output
    assert "--install-completion" in shown
    environ = {**os.environ, "_FOREWORD_COMPLETE": "complete_bash", "COMP_WORDS": "foreword ser", "COMP_CWORD": "1"}
    code = "from foreword.cli.main import app; app(prog_name='foreword')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert found.stdout.strip() == "serve"


def commands(command: Any, *path: str) -> Iterator[tuple[str, ...]]:
    """The names of all commands that do something."""
    children = getattr(command, "commands", None)
    if children is None:
        yield path
    for name, child in (children or {}).items():
        yield from commands(child, *path, name)


COMMANDS = list(commands(get_command(cli.app)))


@pytest.mark.parametrize("command", represented(COMMANDS, *COMMANDS[::3]), ids=" ".join)
def test_help_is_short(command: tuple[str, ...]) -> None:
    """`--help` of each command lists at most 16 options and ends with an example of this command; `--help-all` lists all of
    its options. Without options of `--help-all` it does not name it."""
    short, long = (
        runner.invoke(cli.app, [*command, flag], terminal_width=200, catch_exceptions=False).output
        for flag in ("--help", "--help-all")
    )
    options = [set(re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)) for text in (short, long)]
    assert len(options[0] - {"--help", "--help-all"}) <= 16
    assert options[0] - {"--help-all"} <= options[1]
    assert ("--help-all" in options[0]) == (len(options[1]) > len(options[0] - {"--help-all"}))
    assert "Example" in short and short.rstrip().splitlines()[-1].startswith(f"    foreword {' '.join(command)}")


def test_flags_are_grouped() -> None:
    """`serve --help-all` lists its flags under a heading for each section of the configuration."""
    shown = runner.invoke(cli.app, ["serve", "--help-all"], terminal_width=200).output
    headings = ["Arguments:", "Options:", "Engine:", "Server:", "Named prefixes:", "Stores:"]
    assert [heading for heading in headings if heading in shown] == headings
    assert shown.index("Engine:") < shown.index("--block-size") < shown.index("Server:") < shown.index("--port")


def test_help_contains_no_requirement_numbers_and_no_python() -> None:
    """Help is in plain words: without requirement numbers, and without values such as None."""
    for command in ("serve", "route", "doctor", "demo", "simulate", "verify", "forget"):
        shown = runner.invoke(cli.app, [command, "--help-all"], terminal_width=200).output
        assert not re.search(r"\bR\d+\b|\bNone\b|\bTrue\b|\bFalse\b", shown), command


def test_demo_asks_about_its_prompt() -> None:
    """Each question of the demo names a function whose definition, with its docstring, stands in the demo's prompt."""
    defined = set(re.findall(r'^def (\w+)\(.*\):\n    """', demo.manual(), re.MULTILINE))
    for question in (question for talk in demo.QUESTIONS for question in talk):
        assert defined.intersection(re.findall(r"\w+", question)), question


def test_doctor_without_a_model() -> None:
    """`doctor` reports versions, cores, memory, CPU and port; all is well on a machine where tests run."""
    result = runner.invoke(cli.app, ["doctor", "--no-load", "--port", "0"], catch_exceptions=False)
    assert result.exit_code == 0
    for topic in ("versions", "cores", "memory", "cpu", "port"):
        assert f"ok    {topic}" in result.output


def test_doctor_finds_a_taken_port() -> None:
    """`doctor` says that a port is taken, and its status is 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = runner.invoke(cli.app, ["doctor", "--no-load", "--port", str(taken.getsockname()[1])])
    assert result.exit_code == 1 and "FAIL  port" in result.output


def test_doctor_checks_stores(tmp_path: Path) -> None:
    """`doctor` opens each store; one that cannot be reached, or of an unknown type, is a finding and status 1."""
    good = runner.invoke(cli.app, ["doctor", "--no-load", "--port", "0", "--store", f"disk://{tmp_path}/d?size=1MiB"])
    assert good.exit_code == 0 and "ok    store" in good.output
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dead = f"redis://:secret@127.0.0.1:{listener.getsockname()[1]}"
    for url in (dead, "nonsense://x", "nonsense"):
        bad = runner.invoke(cli.app, ["doctor", "--no-load", "--port", "0", "--store", "memory://", "--store", url])
        assert bad.exit_code == 1 and "ok    store" in bad.output and "FAIL  store" in bad.output
        assert "secret" not in bad.output


def test_doctor_checks_keys(tmp_path: Path) -> None:
    """`doctor` reads the master keys, and finds data keys that they do not decrypt."""
    store, keys = f"disk://{tmp_path}/d?size=1MiB", ["--encryption-key-store", str(tmp_path / "keys")]
    command = ["doctor", "--no-load", "--port", "0", "--store", store, *keys, "--encryption-master-key-file"]
    for name in ("one", "two"):
        line = runner.invoke(cli.app, ["keys", "new-master", name]).output
        (tmp_path / name).write_text(line, encoding="ascii")
    config = EncryptionConfig(key_store=str(tmp_path / "keys"), master_key_file=str(tmp_path / "one"))
    with closing(DataKeys(config)) as opened:
        assert opened.sealing(bytes(12)) is not None
    good, bad = (runner.invoke(cli.app, [*command, str(tmp_path / name)]) for name in ("one", "two"))
    assert good.exit_code == 0 and "ok    keys       1 data keys, 0 that" in good.output
    assert bad.exit_code == 1 and "FAIL  keys       1 data keys, 1 that" in bad.output


def without_package(name: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process in which a package cannot be imported."""
    hidden = f"import sys; sys.modules[{name!r}] = None; sys.argv = ['foreword']; {code}"
    return subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)


@pytest.mark.extended
def test_missing_extras() -> None:
    """Without the packages of an extra, the command and `foreword.LLM` name the extra in a sentence."""
    found = without_package("typer", "from foreword.__main__ import main; main()")
    assert found.returncode == 2 and "pip install 'foreword[server]'" in found.stderr
    assert "Traceback" not in found.stderr
    for code, error in (("LLM; LLM()", "the engine needs torch"), ("AsyncEngine", "foreword.AsyncEngine needs torch")):
        found = without_package("torch", f"from foreword import {code}")
        assert found.returncode == 1 and error in found.stderr
        assert "foreword[engine]" in found.stderr.splitlines()[-1]


def test_doctor_loads_the_model() -> None:
    """`doctor` loads the embedded model and says how large it is; a missing model is a finding, not a crash."""
    engine = EngineConfig(kv_memory="1024 tokens", threads=1)
    found = {item.topic: item for item in examine(Config(engine), load=True)}
    assert found["model"].ok and "KV memory for 1024 tokens" in found["model"].text
    missing = dataclasses.replace(engine, model="/nonexistent/model")
    found = {item.topic: item for item in examine(Config(missing), load=True)}
    assert not found["model"].ok and "/nonexistent/model" in found["model"].text


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full device")
def test_output_without_room() -> None:
    """Where the output has no room, a command says that, with status 1; where its reader has ended, nothing."""
    command = [sys.executable, "-m", "foreword", "keys", "new-master", "one"]
    with open("/dev/full", "w") as full:
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (found.returncode, found.stderr) == (1, "foreword: cannot write the output: No space left on device\n")
    reader, writer = os.pipe()
    os.close(reader)
    found = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (found.returncode, found.stderr) == (1, "")


class Recorder(BaseHTTPRequestHandler):
    """Gives a prepared answer and records the requests."""

    asked: ClassVar[list[tuple[str, str, str | None, Any]]] = []
    answer: ClassVar[tuple[int, bytes]] = (200, b"{}")

    def do_GET(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        self.asked.append((self.command, self.path, self.headers.get("authorization"), body))
        status, content = self.answer
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_DELETE = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def recorder() -> Iterator[str]:
    Recorder.asked.clear()
    server = HTTPServer(("127.0.0.1", 0), Recorder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


PREFIX = {"name": "a b", "version": 2, "kind": "text", "num_tokens": 9, "bytes": 64, "uses": 3, "hit_tokens": 27}


def call(recorder: str, answer: Any, *arguments: str, status: int = 200) -> Any:
    Recorder.answer = (status, json.dumps(answer).encode())
    result = runner.invoke(cli.app, ["prefix", *arguments, "--server", recorder, "--api-key", "k"], input="from stdin")
    return result


def test_prefix_add(recorder: str, tmp_path: Path) -> None:
    """`prefix add` sends text, a file, standard input or messages, with the API key."""
    text, messages = tmp_path / "t.txt", tmp_path / "m.json"
    text.write_text("from file", encoding="utf-8")
    messages.write_text('[{"role": "user", "content": "x"}]', encoding="utf-8")
    for arguments in (["--text", "given"], ["--file", str(text)], ["--file", "-"], ["--messages", str(messages)]):
        result = call(recorder, PREFIX, "add", "a b", *arguments, "--replace")
        assert result.exit_code == 0 and "version 2" in result.output
    methods, paths, keys, bodies = zip(*Recorder.asked, strict=True)
    assert set(methods) == {"POST"} and set(paths) == {"/v1/prefixes"} and set(keys) == {"Bearer k"}
    assert all(body["name"] == "a b" and body["replace"] for body in bodies)
    assert [body.get("content") for body in bodies] == ["given", "from file", "from stdin", None]
    assert bodies[3]["messages"] == [{"role": "user", "content": "x"}]


def test_prefix_list_show_remove(recorder: str) -> None:
    """`prefix list` shows sizes and use, `show` the content as JSON, `remove` what was removed; names are quoted."""
    listed = call(recorder, {"data": [PREFIX], "pinned_bytes": 64, "budget_bytes": 100}, "list")
    assert "a b  version 2" in listed.output and "3 uses" in listed.output and "64 bytes pinned" in listed.output
    shown = call(recorder, {**PREFIX, "content": "é"}, "show", "a b")
    assert json.loads(shown.output)["content"] == "é"
    assert "removed a b" in call(recorder, {"id": "a b", "version": 2}, "remove", "a b").output
    assert call(recorder + "/v1/", {"data": [], "pinned_bytes": 0, "budget_bytes": 0}, "list").exit_code == 0
    assert [(method, path) for method, path, _, _ in Recorder.asked] == [
        ("GET", "/v1/prefixes"),
        ("GET", "/v1/prefixes/a%20b"),
        ("DELETE", "/v1/prefixes/a%20b"),
        ("GET", "/v1/prefixes"),  # the URL that clients of OpenAI's API have means the same
    ]


@pytest.mark.parametrize(
    ("status", "answer", "sentence", "exit_status"),
    [
        (404, {"error": {"message": "No prefix named 'x'"}}, "No prefix named 'x'", 2),
        (409, {"error": {"message": "too large"}}, "too large", 2),
        (503, {"error": {"message": "still loading"}}, "still loading", 1),
        (404, {"detail": "what?"}, "did not answer as a Foreword server does", 2),
    ],
)
def test_server_errors(
    recorder: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    answer: Any,
    sentence: str,
    exit_status: int,
) -> None:
    """The server's own sentence is what the caller sees, and the status says whose fault it is."""
    Recorder.answer = (status, json.dumps(answer).encode())
    assert run_main(monkeypatch, "prefix", "show", "x", "--server", recorder) == exit_status
    assert sentence in capsys.readouterr().err
