"""The commands of README, quickstart and guides, run as they stand (documented_page.py).

Each page has a network of its own, so that the ports of the pages are free. `Qwen/Qwen3-0.6B` is a tiny model with random
weights in the folder of downloaded models.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
import typer
from documented_page import DIRECTIVES, LANGUAGES, ROOT, Step, first_absent, steps
from typer.testing import CliRunner

import foreword
from foreword.cli.main import app
from foreword.store.urls import check_stores

PAGES = [
    "README.md",
    "docs/quickstart.md",
    *(
        f"docs/{folder}/{path.name}"
        for folder in ("guides", "operations")
        for path in sorted((ROOT / "docs" / folder).glob("*.md"))
    ),
]
# Sections that start vLLM.
VLLM = {
    "README.md": "Under vLLM",
    "docs/quickstart.md": "Under vLLM: three minutes",
    "docs/guides/cache-control.md": "Under vLLM",
    "docs/guides/vllm.md": "",
}
# Pages that run in an interpreter of their own, which a variable names.
OWN = {
    "docs/guides/llama-cpp.md": "FOREWORD_LLAMA_PYTHON",
    "docs/guides/ray.md": "FOREWORD_RAY_PYTHON",
}
# Folders of the pages, which are others in a test.
STORED = ("/tmp/foreword", "/var/cache/foreword", "/var/lib/foreword")
EMBEDDED = Path(foreword.__file__).parent / "models" / "stdlib-nano"
REVISION = "0" * 40


@functools.cache
def private_network() -> bool:
    """Whether a process may have a network and process numbers of its own."""
    command = ["unshare", "-rnpf", "--kill-child", "--mount-proc", "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture(scope="session")
def downloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a user who has downloaded Qwen/Qwen3-0.6B: here two layers with random weights."""
    folder = tmp_path_factory.mktemp("huggingface")
    model = folder / "hub" / "models--Qwen--Qwen3-0.6B"
    snapshot = model / "snapshots" / REVISION
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(REVISION)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=4096, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).bfloat16().save_pretrained(snapshot)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, snapshot / name)
    return folder


def commands(page: str) -> list[Step]:
    """The blocks of a page that are run."""
    found = steps((ROOT / page).read_text(encoding="utf-8"))
    return [step for step in found if step.kind in ("sh", "python") and not step.skipped]


def run_page(page: str, folder: Path, downloaded: Path, *sections: str, python: str = sys.executable) -> None:
    """Run a page, or some of its sections, with this interpreter."""
    if not private_network():
        pytest.skip("needs a network of its own: unshare -rn is not permitted here")
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    work = folder / "work"
    work.mkdir()
    stored = [f"--replace={path}={folder / path.strip('/').replace('/', '-')}" for path in STORED]
    paths = [str(Path(python).parent), str(Path(sys.executable).parent)]
    if "FOREWORD_VLLM_PYTHON" in os.environ:
        paths.append(str(Path(os.environ["FOREWORD_VLLM_PYTHON"]).parent))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FOREWORD_")},
        "PATH": os.pathsep.join([*paths, os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(downloaded),
        "HF_HUB_OFFLINE": "1",
    }
    command = [
        "unshare",
        "-rnpf",
        "--kill-child",
        "--mount-proc",
        python,
        str(ROOT / "tests/documented_page.py"),
    ]
    options = [str(ROOT / page), "--folder", str(work), "--loopback", *stored]
    wanted = [f"--section={section}" for section in sections]
    done = subprocess.run([*command, *options, *wanted], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("page", PAGES)
def test_blocks_have_a_language(page: str) -> None:
    """Each block says whether it is a command; one that is not run says why."""
    blocks = [step for step in steps((ROOT / page).read_text(encoding="utf-8")) if step.kind not in DIRECTIVES]
    assert not [f"{page}:{block.line}" for block in blocks if block.kind not in LANGUAGES]
    assert not [f"{page}:{block.line}" for block in blocks if block.skipped and len(block.skipped) < 10]


def shell_words(text: str) -> Iterator[list[str]]:
    """The words of each command of a block, without assignments before it."""
    command = ""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        command += f"{line}\n"
        with contextlib.suppress(ValueError):  # a quotation that continues in the next line
            yield list(itertools.dropwhile(re.compile(r"\w+=").match, shlex.split(command, comments=True)))
            command = ""


def lacking(words: list[str]) -> set[str]:
    """Options, scripts and targets that a command names and that do not exist."""
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    for value in (word for word in words if word.lstrip().startswith("{")):
        json.loads(value)
    if words[:1] == ["foreword"]:
        command = typer.main.get_command(app).commands[words[1]]  # type: ignore[attr-defined]
        return flags - {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
    if words[:1] == ["python"]:
        path = words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1]
        return flags - set(re.findall(r'"(--[\w-]+)"', (ROOT / path).read_text(encoding="utf-8")))
    if words[:1] == ["make"]:
        rules = (ROOT / "Makefile").read_text(encoding="utf-8")
        return {one for one in words[1:] if not re.search(rf"^{one.partition('=')[0]}(:| \?=)", rules, re.MULTILINE)}
    return set()


@pytest.mark.parametrize("page", PAGES)
def test_what_is_not_run_exists(page: str) -> None:
    """Commands that are not run have options, scripts, targets and JSON that are right, and the files in the reasons exist."""
    for block in steps((ROOT / page).read_text(encoding="utf-8")):
        if block.skipped:
            paths = re.findall(r"(?:tests|examples|\.ci)/[\w./-]*\w", block.skipped)
            assert [path for path in paths if not (ROOT / path).exists()] == []
            for words in shell_words(block.text if block.kind == "sh" else ""):
                assert (block.line, lacking(words)) == (block.line, set())


@pytest.mark.parametrize("page", PAGES)
def test_settings_hold(page: str, tmp_path: Path) -> None:
    """A configuration file that a page shows is accepted once each `...` is a secret, and not before. Flags that are shown
    alone have JSON that parses and URLs of stores that are right."""
    for block in steps((ROOT / page).read_text(encoding="utf-8")):
        if block.kind == "toml" and "[project" not in block.text:
            path = tmp_path / f"{block.line}.toml"
            numbers = itertools.count(10**31)
            filled = re.sub(r'\.\.\."', lambda found: f'{next(numbers)}"', block.text)  # noqa: B023
            for text in {block.text, filled}:
                path.write_text(text, encoding="utf-8")
                done = CliRunner().invoke(app, ["config", "serve", "--config", str(path)])
                assert (block.line, done.exit_code == 0) == (block.line, text == filled), done.output
        elif block.kind == "text" and block.text.lstrip().startswith("--"):
            for words in shell_words(block.text.replace("\n", " ")):
                lacking(words)
                urls = [value for flag, value in itertools.pairwise(words) if flag == "--store"]
                urls += [
                    url
                    for settings in (json.loads(word) for word in words if word.startswith("{"))
                    for url in settings.get("kv_connector_extra_config", {}).get("store", [])
                ]
                assert len(check_stores(urls)) == len(urls)


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda path: path.name
)
def test_nothing_unpublished_is_copied(path: Path) -> None:
    """No page tells to install a distribution `foreword`, which the package index does not have."""
    assert not re.search(r"pip install[^\n]*[' ]foreword(?![-\w/])", path.read_text(encoding="utf-8"))


def test_first_screen() -> None:
    """README says first for whom it is, then shows the chart against vLLM and LMCache, how it is installed, one command, and
    what a reader sees then: a count of cached tokens. Every Python block shows its output."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    marks = (
        "**For people who",
        "vllm-compared.svg",
        "pip install",
        "vllm serve",
        '"cached_tokens":2048',
        "from foreword",
    )
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places) and text[: places[4]].count("\n") < 75
    blocks = [step for step in steps(text) if step.kind in ("python", "printed", "sh")]
    after = [later.kind for step, later in itertools.pairwise(blocks) if step.kind == "python"]
    assert after == ["printed", "printed"]


def test_outputs_are_compared() -> None:
    """A line that was not printed is found, also one in another order; a number has the digits that the page shows."""
    printed = "one: 2048\ntwo: 0\n"
    assert first_absent("one: 1024\ntwo: 9\n", printed, exactly=False) is None
    assert first_absent("one: 1024\n", printed, exactly=True) == "one: 1024"
    assert first_absent("one: 0\n", printed, exactly=False) == "one: 0"
    assert first_absent("two: 0\none: 2048\n", printed, exactly=True) == "one: 2048"


def test_readme_library(tmp_path: Path, downloaded: Path) -> None:
    """README's cache in Python hits after it was closed and opened again, and prints what the page shows."""
    run_page("README.md", tmp_path, downloaded, "As a library")


def test_a_copy_of_a_store(tmp_path: Path, downloaded: Path) -> None:
    """The page on moving stores copies one, and prints what it shows."""
    run_page("docs/operations/moving-stores.md", tmp_path, downloaded, "Copy, back up, or change the type")


@pytest.mark.slow
def test_readme_embedded(tmp_path: Path, downloaded: Path) -> None:
    """README's start with the built-in model: the second answer is the first, from the cache."""
    run_page("README.md", tmp_path, downloaded, "The built-in model")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(
    "FOREWORD_VLLM_PYTHON" not in os.environ, reason="FOREWORD_VLLM_PYTHON names no interpreter with vLLM"
)
@pytest.mark.parametrize("page", VLLM)
def test_under_vllm(page: str, tmp_path: Path, downloaded: Path) -> None:
    """The pages' start under vLLM: a hit after a restart. Also the other commands of vLLM's guide."""
    run_page(page, tmp_path, downloaded, *filter(None, [VLLM[page]]))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", OWN)
def test_with_another_library(page: str, tmp_path: Path, downloaded: Path) -> None:
    """The guides for llama.cpp and Ray: what a first run computed is loaded in the next one."""
    if OWN[page] not in os.environ:
        pytest.skip(f"{OWN[page]} names no interpreter")
    run_page(page, tmp_path, downloaded, python=os.environ[OWN[page]])


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in ("docs/guides/vllm.md", *OWN) and commands(page)]
)
def test_commands_work(page: str, tmp_path: Path, downloaded: Path) -> None:
    """Every command of the page works as it is written."""
    sections = dict.fromkeys(step.section for step in commands(page) if step.section != VLLM.get(page))
    run_page(page, tmp_path, downloaded, *sections)
