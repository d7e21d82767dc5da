"""The first commands of pages that need a cluster, another machine or minutes per claim, typed as far as one machine goes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from documented_page import ROOT, Step, steps
from typer.testing import CliRunner

import foreword
from foreword.cli.flags import config_flags
from foreword.cli.main import app
from foreword.store.urls import check_stores

CONTAINERFILE = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8")
# The installed product finds a prefix that it has saved.
_CACHE = """
import sys
from foreword import Cache
with Cache(sys.argv[1], model="m", block_tokens=16, block_bytes=4096) as cache:
    cache.save(list(range(64)), [bytes(4096)] * 4)
with Cache(sys.argv[1], model="m", block_tokens=16, block_bytes=4096) as cache:
    print(cache.find(list(range(64))))
"""


def blocks(page: str) -> list[Step]:
    """The blocks of commands of a page."""
    return [step for step in steps((ROOT / "docs" / page).read_text(encoding="utf-8")) if step.kind == "sh"]


def lines(block: Step) -> list[list[str]]:
    """The words of each command of a block, some of which have quotations over several lines."""
    found, command = [], ""
    for line in block.text.replace("\\\n", " ").splitlines():
        command += f"{line}\n"
        with contextlib.suppress(ValueError):  # a quotation that continues in the next line
            found.append(shlex.split(command, comments=True))
            command = ""
    return [words for words in found if words]


def pages() -> list[str]:
    """Pages for users that have commands."""
    found = ["../README.md", "quickstart.md"]
    found += [
        f"{folder}/{path.name}"
        for folder in ("guides", "operations")
        for path in sorted((ROOT / "docs" / folder).glob("*.md"))
    ]
    return [page for page in found if blocks(page)]


@pytest.mark.parametrize("page", pages())
def test_first_commands_are_typed(page: str) -> None:
    """A page's first block of commands is run as it stands, or the next ones of its section are, or its reason names what
    types it: that file names the page, or makes the page's environment, or installs."""
    first, *others = blocks(page)
    if first.skipped and not any(not one.skipped for one in others if one.section == first.section):
        paths = re.findall(r"(?:tests|\.ci)/[\w./-]*\w", first.skipped)
        texts = [(ROOT / path).read_text(encoding="utf-8") for path in paths]
        assert any(Path(page).name in text for text in texts) or re.match("pip install [^\n]*\n$", first.text), page


def test_images_of_the_kubernetes_guide() -> None:
    """The builds of the guide name a file, targets and arguments that exist, all of the targets that its table lists are there,
    and each flag is one of the builder's, where one is installed."""
    stages = re.findall(r"^FROM \S+ AS ([\w-]+)$", CONTAINERFILE, re.MULTILINE)
    arguments = re.findall(r"^ARG (\w+)=", CONTAINERFILE, re.MULTILINE)
    builder = next(filter(None, map(shutil.which, ("podman", "buildah"))), None)
    known = (
        subprocess.run([builder, "build", "--help"], capture_output=True, text=True, check=True).stdout
        if builder
        else ""
    )
    built = [words for words in lines(blocks("guides/kubernetes.md")[0]) if words]
    assert len(built) == 2
    for words in built:
        assert words[:2] == ["podman", "build"] and words[-1] == "."
        given = dict(zip(words[2:-1:2], words[3:-1:2], strict=True))
        assert {*given} <= {"-f", "--target", "--build-arg", "-t"}
        assert all(re.search(rf"(^|\s){flag}\b", known, re.MULTILINE) for flag in given if known)
        assert given["-f"] == "deploy/Containerfile" and given["--target"] in stages
        assert given.get("--build-arg", f"{arguments[0]}=").partition("=")[0] in arguments
    page = (ROOT / "docs" / "guides" / "kubernetes.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(\w+)` \|", page[: page.index("\n## 2.")], re.MULTILINE)
    assert {*table} == {stage for stage in stages if not stage.endswith("-wheels")} - {"sources"}


def test_commands_of_the_kubernetes_guide(tmp_path: Path) -> None:
    """`kubectl` makes the Secret of the guide, whose keys are variables of the configuration; the chart's Service has the name
    and the port that the guide forwards, in its namespace."""
    helm = pytest.importorskip("helm_python")
    secret, install, forward, asked = lines(blocks("guides/kubernetes.md")[1])
    values = tmp_path / install[install.index("-f") + 1]
    page = (ROOT / "docs" / "guides" / "kubernetes.md").read_text(encoding="utf-8")
    [text] = re.findall(rf"```yaml\n# {values.name}\n(.*?)```", page, re.DOTALL)
    namespace, name = install[install.index("-n") + 1], install[2]
    with helm.Chart.load(str(ROOT / install[3])) as chart:
        files = chart.render(yaml.safe_load(text), name=name, namespace=namespace)
    objects = [
        one for file, made in files.items() if not file.endswith("NOTES.txt") for one in yaml.safe_load_all(made) if one
    ]
    assert forward[:2] == ["kubectl", "port-forward"] and forward[forward.index("-n") + 1] == namespace
    kind, _, service = forward[-2].partition("/")
    mine, _, port = forward[-1].partition(":")
    [found] = [one for one in objects if one["kind"].lower() == kind and one["metadata"]["name"] == service]
    assert int(port) in [one["port"] for one in found["spec"]["ports"]] and f"localhost:{mine}/v1/models" in asked[1]
    keys = re.findall(r"--from-literal=(\w+)=", " ".join(secret))
    assert {*keys} <= {f"FOREWORD_{flag.section}_{flag.key}".upper() for flag in config_flags()}
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, which makes the Secret without a cluster")
    made = subprocess.run([*secret, "--dry-run=client", "--output=json"], capture_output=True, text=True, check=True)
    one: dict[str, Any] = json.loads(made.stdout)
    assert (one["metadata"]["name"], one["metadata"]["namespace"]) == (
        yaml.safe_load(text)["router"]["existingSecret"],
        namespace,
    )
    assert {*one["data"]} == {*keys} and len(keys) == 2


def test_the_picker_of_the_gateway_guide() -> None:
    """The picker's flags are read as the guide has them: two replicas, and the address on which it picks."""
    [line] = [words for words in lines(blocks("guides/gateway.md")[0]) if words[:2] == ["foreword", "route"]]
    tokenizer = str(ROOT / "foreword" / "models" / "stdlib-nano")
    done = CliRunner().invoke(app, ["config", *(tokenizer if word == "MODEL" else word for word in line[1:]), "--json"])
    assert done.exit_code == 0, done.output
    values = {name: one["value"] for name, one in json.loads(done.output).items()}
    assert values == {
        "router.picker": line[line.index("--picker") + 1],
        "router.tokenizer": tokenizer,
        "router.replicas": [word for word in line if word.startswith("http://")],
    }


def test_the_roles_of_the_disaggregation_guide() -> None:
    """Each of the guide's instances is read as it stands: a role and an address of its own."""
    seen = []
    for words in lines(blocks("guides/disaggregation.md")[0]):
        done = CliRunner().invoke(app, ["config", words[1], *words[3:], "--json"])
        assert words[:3] == ["foreword", "serve", "MODEL"] and done.exit_code == 0, done.output
        values = {name: one["value"] for name, one in json.loads(done.output).items()}
        seen.append((values.get("server.role", "both"), values["transfer.bind"], values["server.port"]))
    assert {role for role, _, _ in seen} == {"prefill", "decode", "both"}
    assert all(len({*column}) == 3 for column in zip(*seen, strict=True))


def offloading() -> list[str]:
    """The words of the start of vLLM with its own offloading."""
    [words] = lines(blocks("guides/vllm-offloading.md")[0])
    assert words[:2] == ["vllm", "serve"]
    return words


def test_the_tier_of_the_offloading_guide() -> None:
    """The guide gives vLLM what the files for KServe give it, which other tests compare with their schemas: only the store is
    another one, and that is a store."""
    words = offloading()
    given = json.loads(words[words.index("--kv-transfer-config") + 1])
    file = yaml.safe_load((ROOT / "deploy/kserve/llminferenceservice-offloading.yaml").read_text(encoding="utf-8"))
    [variable] = file["spec"]["template"]["containers"][0]["env"]
    deployed = json.loads(shlex.split(variable["value"])[-1])
    stores = [one["kv_connector_extra_config"]["secondary_tiers"][0].pop("store") for one in (given, deployed)]
    assert given == deployed and all(len(check_stores(urls)) == len(urls) for urls in stores)


_PARSED = """
import json, sys
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
found = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
print(json.dumps([found.kv_offloading_backend, found.kv_offloading_size, found.shutdown_timeout]))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    "FOREWORD_VLLM_PYTHON" not in os.environ, reason="FOREWORD_VLLM_PYTHON names no interpreter with vLLM"
)
def test_the_start_of_the_offloading_guide() -> None:
    """vLLM's own parser takes each flag of the guide's start."""
    command = [os.environ["FOREWORD_VLLM_PYTHON"], "-c", _PARSED, *offloading()[2:]]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ["native", 32.0, 30]


def conforming() -> list[tuple[str, list[str]]]:
    """The commands of the pages upgrading.md and conformance.md that run claims in vLLM."""
    found = []
    for page in ("operations/upgrading.md", "operations/conformance.md"):
        of_page = [words for words in lines(blocks(page)[0]) if any("bin/python" in word for word in words)]
        found += [(f"{Path(page).stem}-{number}", words) for number, words in enumerate(of_page)]
    assert len(found) == 4
    return found


@pytest.mark.parametrize(("name", "words"), conforming(), ids=[name for name, _ in conforming()])
def test_claims_need_an_interpreter_with_vllm(name: str, words: list[str], tmp_path: Path) -> None:
    """The command asks all its interpreters before it begins: the last one, which has no vLLM here, ends it at once with its
    path, and nothing is written."""
    paths = [word for word in words if word.endswith("bin/python")]
    made = {path: tmp_path / f"python{number}" for number, path in enumerate(paths)}
    for path, here in made.items():
        versions = "torch 2.13" if path == paths[-1] else "vllm 0.31.0, torch 2.13"
        here.write_text(f"#!/bin/sh\necho '{versions}'\n", encoding="utf-8")
        here.chmod(0o755)
    given = [str(made.get(word, word)).replace("/tmp/kv", str(tmp_path / "kv")) for word in words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", *given]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert re.search(rf"{re.escape(str(made[paths[-1]]))} has no (vLLM|module \w+)", done.stderr), done.stderr
    assert done.stderr.count("\n") == 1
    assert {*tmp_path.iterdir()} == {*made.values()}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_install_without_internet(tmp_path: Path) -> None:
    """The page's wheels are built in an empty environment and installed into another one that has no network: `foreword`
    and the connector's settings work there, and nothing was fetched."""
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode:
        pytest.skip("needs a network of its own: unshare -rn is not permitted here")
    build, install = blocks("operations/offline.md")[:2]
    checkout, machine = tmp_path / "checkout", tmp_path / "machine"
    shutil.copytree(
        ROOT, checkout, ignore=shutil.ignore_patterns(".git", ".venv*", "tests", "docs", "dev", "site", "__pycache__")
    )
    machine.mkdir()
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("FOREWORD_") and name != "PYTHONPATH"
    }
    environ["FOREWORD_WHEEL_CXX"] = "none"  # test_install compiles
    for name in ("one", "two"):
        subprocess.run([sys.executable, "-m", "venv", str(tmp_path / name)], check=True)

    def typed(block: Step, name: str, folder: Path, *before: str) -> str:
        path = f"{tmp_path / name / 'bin'}:{environ['PATH']}"
        done = subprocess.run(
            [*before, "bash", "-ec", block.text],
            cwd=folder,
            env={**environ, "PATH": path},
            capture_output=True,
            text=True,
        )
        if "No matching distribution" in done.stderr and not before:
            pytest.skip(f"pip reaches no package index: {done.stderr[-300:]}")
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    typed(build, "one", checkout)
    shutil.move(checkout / "wheels", machine / "wheels")
    # No network, and none of the packages that this machine's own settings of pip name.
    environ["PIP_CONFIG_FILE"] = os.devnull
    typed(install, "two", machine, "unshare", "-rn")
    done = subprocess.run(
        [
            "unshare",
            "-rn",
            str(tmp_path / "two" / "bin" / "python"),
            "-c",
            _CACHE,
            f"disk://{tmp_path}/kv?codec=lossless",
        ],
        env=environ,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "64\n"), done.stderr
    shown = subprocess.run(
        [tmp_path / "two" / "bin" / "foreword", "--version"], env=environ, capture_output=True, text=True
    )
    assert shown.stdout.strip().endswith(foreword.__version__), shown.stderr
