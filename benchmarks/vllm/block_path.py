"""Which files of the package a KV block passes under vLLM, and how many of their functions: saved to memory and disk, loaded
from memory, loaded from disk.

    PYTHONPATH=. ENVIRONMENT/bin/python -m benchmarks.vllm.block_path MODEL [--files]     with the names of functions, as JSON

MODEL is a folder (see engine/random_model.py); ENVIRONMENT has vLLM, whose scheduler and worker run in this process. A profile
function sees each call in each thread. A save goes from the request that computes a block to the index of the disk store that
has it; a load from the lookup of the same prompt, whose blocks vLLM has forgotten, to its first token. What happens once, such
as the measurement of what the weights compute, belongs to the requests before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.harness import table
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tier_counters import Rate

PACKAGE = f"{Path(__file__).parents[2] / 'foreword'}{os.sep}"
BLOCK = 32
WITHIN = 120.0

seen: set[tuple[str, str]] = set()
recording = threading.Event()


def profile(frame: FrameType, event: str, _argument: object) -> None:
    if event == "call" and recording.is_set() and frame.f_code.co_filename.startswith(PACKAGE):
        seen.add((frame.f_code.co_filename[len(PACKAGE) :], frame.f_code.co_qualname))


class Unmeasured(Rate):
    """A rate that is never measured: all that is found is loaded, however small the model."""

    def note(self, amount: float, seconds: float) -> None:
        """Ignored."""


def make_llm(model: str, stores: list[str]) -> Any:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
    from vllm import LLM

    transfer = {
        "kv_connector": "ForewordConnector",
        "kv_connector_module_path": "foreword.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": stores, "lookup_timeout": WITHIN, "load_timeout": WITHIN},
    }
    return LLM(
        model,
        kv_transfer_config=transfer,
        dtype="float32",
        max_model_len=512,
        block_size=BLOCK,
        enforce_eager=True,
        disable_log_stats=True,
        kv_cache_memory_bytes=64 << 20,
        skip_tokenizer_init=True,
        seed=0,
    )


def trace(model: str, folder: str) -> dict[str, list[tuple[str, str]]]:
    """Files and functions of a save, a load from memory and one from disk."""
    threading.setprofile(profile)
    llm = make_llm(model, ["memory://?size=64MiB", f"disk://{folder}/kv?size=256MiB"])
    from vllm import SamplingParams

    from foreword.integrations.vllm.worker_side import worker_of

    worker = worker_of(str(llm.llm_engine.vllm_config.kv_transfer_config.engine_id))
    assert worker is not None and worker.offload is not None
    offload = worker.offload
    memory = offload.store.tiers[0].store
    assert isinstance(memory, MemoryStore)
    draw = random.Random(0)

    def ask(prompt: list[int], *, record: bool) -> int:
        """Tokens of the prompt that were not computed. Returns when what they made is written."""
        seen.clear()
        if record:
            recording.set()
            sys.setprofile(profile)
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
        [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        sys.setprofile(None)
        assert offload.flush(WITHIN)
        recording.clear()
        llm.reset_prefix_cache()
        return int(output.num_cached_tokens)

    def forget() -> None:
        """Leave the blocks on the disk only."""
        deadline = time.monotonic() + WITHIN
        memory.delete([block.name for block in memory.scan(deadline=deadline)], deadline=deadline)

    def prompt() -> list[int]:
        return [draw.randrange(10, 400) for _ in range(2 * BLOCK + 8)]

    offload.prefill_rate = Unmeasured()
    found = {}
    for once in (False, True):
        tokens = prompt()
        assert ask(tokens, record=once) == 0
        found["saved"] = sorted(seen)
        assert ask(tokens, record=once) == 2 * BLOCK
        found["loaded from memory"] = sorted(seen)
        forget()
        assert ask(tokens, record=once) == 2 * BLOCK
        found["loaded from disk"] = sorted(seen)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--files", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = trace(given.model, folder)
    if given.files:
        print(json.dumps(found))
    else:
        rows = [[name, str(len({file for file, _ in calls})), str(len(calls))] for name, calls in found.items()]
        every = {one for calls in found.values() for one in calls}
        rows.append(["all of them", str(len({file for file, _ in every})), str(len(every))])
        print(table(["block", "files", "functions"], rows))
    sys.stdout.flush()
    os._exit(0)  # vLLM's shutdown takes seconds


if __name__ == "__main__":
    main()
