"""Parts of other packages: the example store of `examples/sqlite-store`, as if pip had installed it, and broken packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest
from servers import wait_until
from vllm_process import CHECKOUT, answers, attempt, make_model, needs_vllm, prompts, result

from foreword.errors import ConfigError
from foreword.plugins import Plugins
from foreword.store.types import StoreType

_EXAMPLE = CHECKOUT / "examples" / "sqlite-store"
_WITHIN = 300.0
_TWICE = """
import sys
from foreword import LLM, SamplingParams
for _ in range(2):
    with LLM(store=sys.argv[1], kv_memory="4096 tokens") as llm:
        [output] = llm.generate(["import os\\n" * 60], SamplingParams(max_tokens=1, temperature=0.0))
        print(output.cached_tokens)
"""


def describe(folder: Path, project: Path) -> None:
    """Write what pip would write about a package: its name, its version, and the entry points of its pyproject.toml."""
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    info = folder / f"{declared['name'].replace('-', '_')}-{declared['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {declared['name']}\nVersion: {declared['version']}\n")
    groups = declared["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in some.items()) for group, some in groups]
    (info / "entry_points.txt").write_text("".join(lines))


@pytest.fixture
def path(tmp_path: Path) -> str:
    """PYTHONPATH of an environment with the example."""
    (tmp_path / "installed").mkdir()
    describe(tmp_path / "installed", _EXAMPLE)
    return os.pathsep.join([str(CHECKOUT), str(tmp_path / "installed"), str(_EXAMPLE)])


def run(path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FOREWORD_")}
    environment["PYTHONPATH"] = path
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_WITHIN, check=False)


def foreword(path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(path, "-m", "foreword", *arguments)


@pytest.mark.slow
def test_the_example_passes_the_contract(path: str) -> None:
    """The example's own tests, which are those of the contract with a budget and pins, pass."""
    done = run(path, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", str(_EXAMPLE))
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
def test_conform_knows_a_store_of_another_package(path: str, tmp_path: Path) -> None:
    """`foreword conform --store` runs the contract on the URL of a store of another package, and leaves nothing behind."""
    (tmp_path / "folder").mkdir()
    done = foreword(path, "conform", "--store", f"sqlite://{tmp_path}/folder/kv.db?size=1GiB")
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and not list((tmp_path / "folder").iterdir())


@pytest.mark.slow
def test_an_engine_uses_a_store_of_another_package(path: str, tmp_path: Path) -> None:
    """An engine hits what an earlier one has written to such a store; `inspect` lists it, and creates none."""
    url = f"sqlite://{tmp_path}/folder/kv.db?size=64MiB"
    missing = foreword(path, "inspect", url)
    assert (missing.returncode, missing.stdout) == (
        1,
        "",
    ) and missing.stderr == f"foreword: no store at sqlite://{tmp_path}/folder/kv.db\n"
    assert not (tmp_path / "folder").exists()
    done = run(path, "-c", _TWICE, url)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = map(int, done.stdout.split())
    assert first == 0 and second > 100
    shown = foreword(path, "inspect", url)
    assert shown.returncode == 0 and "stdlib-nano" in shown.stdout


@pytest.mark.slow
def test_explain_follows_a_store_of_another_package(path: str, tmp_path: Path) -> None:
    """`foreword explain` sees that what is gone from the device comes back from such a store."""
    options = ("--port", "0", "--kv-memory", "4096 tokens", "--threads", "1", "--store", f"sqlite://{tmp_path}/kv.db")
    command = [sys.executable, "-m", "foreword", "serve", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FOREWORD_")}
    environment["PYTHONPATH"] = path
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stderr is not None
            url = next(found[0] for line in server.stderr if (found := re.search(r"http://\S+:\d+", line)))
            wait_until(lambda: httpx.get(f"{url}/ready").is_success, "the model")
            done = foreword(path, "explain", url)
        finally:
            server.kill()
    assert done.returncode == 0 and "tokens came from sqlite" in done.stdout, done.stdout


@pytest.mark.extended
def test_mistakes_in_the_url_of_such_a_store(path: str, tmp_path: Path) -> None:
    """Its options are checked like those of built-in stores; without the package its scheme is unknown."""
    wrong = foreword(path, "serve", "--store", f"sqlite://{tmp_path}/kv.db?sise=1GiB")
    assert wrong.returncode == 2 and "Did you mean 'size'?" in wrong.stderr
    unknown = foreword(str(CHECKOUT), "serve", "--store", f"sqlite://{tmp_path}/kv.db")
    assert unknown.returncode == 2 and "unknown store type 'sqlite'. Known: 'az', 'disk'" in unknown.stderr


class TestVllm:
    pytestmark = needs_vllm

    def test_the_store_setting(self, path: str, tmp_path: Path) -> None:
        """vLLM's connector opens such a store by its URL: a second process hits what the first has saved."""
        model, asked = make_model(tmp_path / "model"), prompts(1, [200])
        url = f"sqlite://{tmp_path}/kv.db?size=64MiB"
        job = {"model": str(model), "store": [url], "rounds": [asked]}
        rounds = [result(attempt("vllm_script.py", job, False, PYTHONPATH=path))["rounds"][0] for _ in range(2)]
        assert [one[0]["cached"] for one in rounds] == [0, 192]
        assert answers(rounds[0]) == answers(rounds[1])


_FORMAT_AND_POLICY = """
import json
from foreword.api.tools.formats import ToolFormat
from foreword.routing.rule_policies import RulePolicy

class Bang(ToolFormat):
    # `!name {...}` at the start of an answer is a call.
    def detects(self, template, model_type):
        return "{{ bang }}" in template

    def read(self, reader, pieces, tools):
        if (yield from reader.literal("!")):
            name = []
            yield from reader.until((" ",), name.append)
            pieces.call("".join(name))
            while (yield from reader.peek()):
                pieces.arguments(reader.available())

    def grammar(self, tools, marker, parallel):
        return 'calls: "!" name " {}"\\nname: ' + " | ".join(json.dumps(tool.name) for tool in tools)

class Last(RulePolicy):
    name = "last"

    def pick(self, query, usable):
        return usable[-1].name

BANG = Bang()
"""
_USE = """
from foreword.api.output import CallArguments, CallStart
from foreword.api.request import Tool, ToolChoice
from foreword.api.tools.constraint import forced_calls
from foreword.api.tools.parser import detect, formats_named
from foreword.api.tools.parser import parse
tools = [Tool("dig", "", {})]
formats = detect("{{ bang }}")
assert formats == formats_named("bang", None)
[start, arguments] = parse('!dig {"deep": 1}', formats, tools)
assert (start.name, arguments.text) == ("dig", '{"deep": 1}'), (start, arguments)
forced = forced_calls(tools, ToolChoice("required"), formats, lambda text: None, parallel=False, reasoning_open=False)
assert forced.value.startswith('start: calls') and '"dig"' in forced.value
from foreword.sim.costs import EngineCosts, FleetSpec
from foreword.sim.run import simulate
from foreword.sim.trace import TraceRequest
requests = [TraceRequest(9.0 * number, [number], 64, 64, 1) for number in range(4)]
result = simulate(requests, FleetSpec(replicas=3, block_size=64), "last", EngineCosts())
print([name for name, one in result.replicas.items() if one.steps])
"""


def test_a_bug_is_a_sentence(tmp_path: Path) -> None:
    """An error that nobody expected, such as that of a package that fails when it is imported, is one line, which names a file
    with the traceback."""
    (tmp_path / "bug.py").write_text("1 / 0")
    (tmp_path / "pyproject.toml").write_text(
        "[project]\nname = 'bug'\nversion = '1'\n[project.entry-points.'foreword.stores']\nbug = 'bug:BUG'\n"
    )
    describe(tmp_path, tmp_path)
    done = foreword(os.pathsep.join([str(CHECKOUT), str(tmp_path)]), "inspect", "bug:///x")
    [line] = done.stderr.splitlines()
    assert done.returncode == 1 and line.endswith(": ZeroDivisionError: division by zero")
    [file] = re.findall(r"/\S+\.log", line)
    assert "bug.py" in Path(file).read_text()
    Path(file).unlink()


def test_a_tool_format_and_a_policy_of_another_package(tmp_path: Path) -> None:
    """A format is found by name and in a chat template, reads calls and forces them. A policy places simulated requests, and
    `--policy` and `--tool-parser` take the names."""
    (tmp_path / "bang.py").write_text(_FORMAT_AND_POLICY)
    (tmp_path / "pyproject.toml").write_text(
        "[project]\nname = 'bang'\nversion = '1'\n"
        "[project.entry-points.'foreword.tool_formats']\nbang = 'bang:BANG'\n"
        "[project.entry-points.'foreword.placement_policies']\nlast = 'bang:Last'\n"
    )
    describe(tmp_path, tmp_path)
    path = os.pathsep.join([str(CHECKOUT), str(tmp_path)])
    used = run(path, "-c", _USE)
    assert used.returncode == 0, used.stderr[-3000:]
    assert used.stdout == "['r2']\n"


def test_broken_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that cannot be imported, that is missing from its module, or that is something else is an error that names the
    package. A built-in part cannot be replaced."""
    parts = {
        "gone": "no_such_module:X",
        "missing": "string:no_such_name",
        "other": "string:digits",
        "disk": "string:digits",
    }
    entries = "".join(f"{name} = '{value}'\n" for name, value in parts.items())
    (tmp_path / "pyproject.toml").write_text(
        f"[project]\nname = 'broken-parts'\nversion = '1'\n[project.entry-points.'foreword.stores']\n{entries}"
    )
    describe(tmp_path, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    disk = StoreType()
    plugins = Plugins("foreword.stores", "store type", StoreType, {"disk": disk})
    assert plugins["disk"] is disk and list(plugins) == ["disk", "gone", "missing", "other"]
    for name, words in (("gone", "no_such_module"), ("missing", "no_such_name"), ("other", "must be of the class")):
        with pytest.raises(ConfigError, match=f"the store type '{name}' .*broken-parts.*{words}"):
            plugins[name]
    with pytest.raises(ConfigError, match=r"unknown store type 'disc'\. Did you mean 'disk'"):
        plugins["disc"]
