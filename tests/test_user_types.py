"""The types that users of the installed package get: `mypy --strict` over a program of theirs."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from products import NEEDS

from foreword.config import keys_of
from foreword.engine_config import EngineConfig, EngineOptions

ROOT = Path(__file__).parents[1]
PROGRAM = '''"""Answers questions about a module, with the cache in front of it. The comments count the mistakes."""

from collections.abc import Sequence
from pathlib import Path

from foreword import LLM, Cache, EngineConfig, ForewordError, PrefixCache, SamplingParams
from foreword.engine.request import RequestOutput

STORE = "disk:///var/cache/foreword?size=20GiB"


def open_model(folder: Path | None) -> LLM:
    return LLM(str(folder) if folder else None, dtype="float32", block_size=16, kv_memory="1GiB", store=STORE)


def open_wrongly(folder: Path) -> LLM:
    return LLM(modell=str(folder))  # 1


def settings() -> EngineConfig:
    return EngineConfig(block_size=32, max_model_len=None)


def ask(llm: LLM, questions: Sequence[str], limit: int) -> list[RequestOutput]:
    short = SamplingParams(max_tokens=limit, temperature=0.0, stop="\\n")
    return llm.generate(questions, short, prefix=None)


def ask_long(llm: LLM, question: str) -> str:
    [output] = llm.generate(question, SamplingParams(max_token=100))  # 2
    return output.outputs[0].text


def shares(outputs: Sequence[RequestOutput]) -> dict[str, float]:
    return {one.request_id: one.cached_tokens / max(len(one.prompt_tokens), 1) for one in outputs}


def texts(outputs: Sequence[RequestOutput]) -> list[str]:
    return [completion.txt for one in outputs for completion in one.outputs]  # 3


def saved(tokens: list[int], blocks: list[bytes]) -> int:
    with Cache("memory://?size=1GiB", STORE, model="mine", block_tokens=16, block_bytes=4096) as cache:
        cache.save(tokens, blocks)
        return cache.find("not tokens")  # 4


def half_precision() -> LLM:
    return LLM(dtype="half", block_size=16)  # 5


def blocks_of(tokens: list[int]) -> int:
    pool = PrefixCache(num_blocks=8, block_size="16")  # 6
    return len(pool.lookup(pool.open(tokens)).blocks)


def main() -> None:
    try:
        for name, share in shares(ask(open_model(None), ["What is KV?"], 16)).items():
            print(name, f"{share:.0%}")
    except ForewordError as error:
        print(error.message, error.status)
'''


def test_options_are_those_of_the_engine() -> None:
    """`LLM(...)` is typed with each field of the engine's configuration, its type, and the choices that it has."""
    fields = {item.name: item for item in keys_of(EngineConfig)}
    types_of, options = get_type_hints(EngineConfig), get_type_hints(EngineOptions)
    assert {"model", *options} == {*fields}
    for name, hint in options.items():
        if get_origin(hint) is Literal:
            choices = get_args(hint)
            rule = f"{', '.join(choices[:-1])} or {choices[-1]}"
            assert types_of[name] is str and fields[name].metadata["rule"] == rule
        else:
            assert types_of[name] == hint, name


@pytest.mark.extended
def test_every_product_brings_the_types() -> None:
    """The marker for type checkers is in the wheel of the cache, which every product needs, since all are one package."""
    files_of = runpy.run_path(str(ROOT / "packages" / "build_hook.py"))["files_of"]
    assert Path("py.typed") in files_of("cache")
    assert all("cache" in needs for product, needs in NEEDS.items() if product != "cache")


@pytest.mark.extended
def test_mistakes_of_a_user_are_found(tmp_path: Path) -> None:
    """Against the built wheel, without the sources: of the user's program mypy finds the six mistakes, and nothing else."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    built = subprocess.run(
        command, env={**os.environ, "FOREWORD_WHEEL_CXX": "none"}, capture_output=True, text=True, cwd=tmp_path
    )
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    [site] = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (tmp_path / "user.py").write_text(PROGRAM)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(tmp_path / "env/bin/python"), "user.py"],
        cwd=tmp_path,
        env={name: text for name, text in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")},
        capture_output=True,
        text=True,
    )
    found = {int(line) for line in re.findall(r"^user\.py:(\d+): error:", checked.stdout, re.MULTILINE)}
    expected = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if re.search(r"# \d$", line)}
    assert found == expected, checked.stdout + checked.stderr
    assert len(expected) == 6 and f"Found {len(expected)} errors in 1 file" in checked.stdout
