"""Models that are loaded without torch's compiler compute what they compute with it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

from foreword.entrypoints.llm import LLM

PROMPT = list(range(5, 45))
SCRIPT = """
import json, sys
from foreword.engine.without_compiler import without_compiler

found = {}
with without_compiler():
    from foreword.engine_config import EngineConfig
    from foreword.engine.request import SamplingParams
    from foreword.entrypoints.llm import LLM

    paths, prompt = json.load(sys.stdin)
    for path in paths:
        llm = LLM(path, dtype="float32", kv_memory="2048 tokens", threads=1)
        found[path] = list(llm.generate([prompt], SamplingParams(max_tokens=12, temperature=0.0))[0].outputs[0].tokens)
        llm.close()
absent = [name for name in ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy") if name not in sys.modules]
import torch

again = torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist()
print(json.dumps([found, absent, again]))
"""


@pytest.mark.slow
def test_all_families_without_the_compiler(folder: Callable[[str], Path], engine: Callable[..., LLM]) -> None:
    """Every family loads, passes its self-check and has its usual tokens in a process that has not imported torch's compiler.
    The compiler can be used there afterwards."""
    families = {str(folder(name)): name for name in tiny.FAMILIES}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([list(families), PROMPT]),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found, absent, again = json.loads(done.stdout.splitlines()[-1])
    assert absent == ["torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy"] and again == [2.0, 2.0]
    params = tiny.greedy(12)
    for path, name in families.items():
        [expected] = engine(name).generate([PROMPT], params)
        assert found[path] == list(expected.outputs[0].tokens), name
