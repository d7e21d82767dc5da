"""Starts the scripts that run in an environment with vLLM, which FOREWORD_VLLM_PYTHON names, on tiny random models."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import random
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import transformers
from vllm_waits import WITHIN

from foreword.referee.process import VLLM_MODULES, VLLM_VARIABLES, Forked, Forks

PYTHON = os.environ.get("FOREWORD_VLLM_PYTHON", "")
HERE = Path(__file__).parent
CHECKOUT = HERE.parent.parent
# Warnings are for the tests; scripts print their results.
_LOGGING = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", **VLLM_VARIABLES, **_LOGGING}
_SERVE = ("vllm.entrypoints.cli.main", "vllm.entrypoints.cli.serve", "vllm.entrypoints.openai.api_server")
_forks = Forks(PYTHON, _ENVIRONMENT, (*VLLM_MODULES, *_SERVE))
atexit.register(_forks.close)
BLOCK = 32

needs_vllm = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="FOREWORD_VLLM_PYTHON names no interpreter with vLLM"),
    pytest.mark.timeout(600),
]


def make_model(folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, initializer_range=0.2, max_position_embeddings=512,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run(script: str, job: dict[str, Any], **how: Any) -> dict[str, Any]:
    """The JSON that a script of this folder prints for the job."""
    return result(attempt(script, job, **how))


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """A script's last line."""
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def attempt(
    script: str, job: dict[str, Any], forked: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of this folder. Not `forked`: it imports vLLM itself, and has a hash seed of its own."""
    if not forked:
        given = {**_ENVIRONMENT, **environment}
        command = [PYTHON, str(HERE / script), json.dumps(job)]
        return subprocess.run(command, capture_output=True, text=True, env=given, timeout=500, check=False)
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as warned:
        process = start(script, job, environment, stdout=said, stderr=warned)
        process.wait(500)
        said.seek(0)
        warned.seek(0)
        return subprocess.CompletedProcess([script], process.wait(), said.read(), warned.read())


def start(script: str, job: dict[str, Any], environment: Mapping[str, str], **files: IO[str]) -> Forked:
    """Start a script of this folder in a process that has imported vLLM."""
    return _forks.start([str(HERE / script), json.dumps(job)], variables=environment, path=[str(HERE)], **files)


def serve(
    arguments: list[str], environment: Mapping[str, str], output: IO[str], forked: bool
) -> Forked | subprocess.Popen[str]:
    """Start the `vllm` command with these arguments in a process group of its own; output and errors go to a file."""
    if forked:
        command = [str(HERE / "vllm_serve_script.py"), *arguments]
        return _forks.start(command, variables=environment, path=[str(HERE)], stdout=output, stderr=output)
    given = {**_ENVIRONMENT, "PYTHONPATH": f"{CHECKOUT}:{HERE}", **environment}
    command = [PYTHON, "-m", "vllm.entrypoints.cli.main", *arguments]
    return subprocess.Popen(command, stdout=output, stderr=output, env=given, text=True, start_new_session=True)


def vllm(
    model: Path, store: list[str] | None, rounds: list[list[list[int]]], *, forked: bool = True, **job: Any
) -> dict[str, Any]:
    return result(
        attempt("vllm_script.py", {"model": str(model), "store": store, "rounds": rounds, **job}, forked=forked)
    )


def prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1, 500) for _ in range(length)] for length in lengths]


def answers(found: list[dict[str, Any]]) -> list[list[int]]:
    return [one["tokens"] for one in found]


def disk(folder: Path) -> str:
    return f"disk://{folder}/kv?size=256MiB"


class RemoteVllm:
    """A vLLM in another process (`vllm_remote.py`), which a test calls."""

    def __init__(
        self, log: Path, environment: Mapping[str, str], model: Path, store: list[str] | None, **job: Any
    ) -> None:
        self._log = log
        with log.open("w") as said:
            self._process = start(
                "vllm_remote.py", {"model": str(model), "store": store, **job}, environment, stderr=said
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.pid = 0

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as said:
            for line in said:
                if "reply> " in line:
                    self._lines.put(line.partition("reply> ")[2])
        self._lines.put("")

    @property
    def log(self) -> str:
        return self._log.read_text()

    def answer(self) -> dict[str, Any]:
        line = self._lines.get(timeout=WITHIN)
        assert line, self.log[-3000:]
        found: dict[str, Any] = json.loads(line)
        return found

    def ready(self) -> RemoteVllm:
        self.pid = self.answer()["ready"]
        return self

    def call(self, do: str, **more: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def ask(self, prompt: list[int], params: dict[str, Any] | None = None, count: int = 8) -> dict[str, Any]:
        return self.call("ask", prompt=prompt, params=params, count=count)

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """The `kv_transfer_params` of a prefill request's answer."""
        found: dict[str, Any] = self.ask(prompt, {"do_remote_decode": True}, 1)["params"]
        return found

    def end(self) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(WITHIN)
        self._process.kill()
        self._process.wait(WITHIN)
