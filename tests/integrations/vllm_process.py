"""Starts the scripts that run in an environment with vLLM, which FOREWORD_VLLM_PYTHON names, on tiny random models."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

PYTHON = os.environ.get("FOREWORD_VLLM_PYTHON", "")
CHECKOUT = Path(__file__).parent.parent.parent
BLOCK = 32
_WITHIN = 300.0

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


def run(script: str, job: dict[str, Any], **environment: str) -> dict[str, Any]:
    """The JSON that a script of this folder prints for the job."""
    return result(attempt(script, job, **environment))


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """A script's last line."""
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def attempt(script: str, job: dict[str, Any], **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", **environment}
    command = [PYTHON, str(Path(__file__).parent / script), json.dumps(job)]
    return subprocess.run(command, capture_output=True, text=True, env=given, timeout=500, check=False)


def vllm(model: Path, store: list[str] | None, rounds: list[list[list[int]]], **job: Any) -> dict[str, Any]:
    return run("vllm_script.py", {"model": str(model), "store": store, "rounds": rounds, **job})


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
        given = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", **environment}
        command = [
            PYTHON,
            str(Path(__file__).parent / "vllm_remote.py"),
            json.dumps({"model": str(model), "store": store, **job}),
        ]
        self._log = log
        with log.open("wb") as said:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, env=given
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
        line = self._lines.get(timeout=_WITHIN)
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
            self._process.wait(60)
        self._process.kill()
        self._process.wait(60)
