"""Measures how the connector finds the namespace at the start of a vLLM: the probe's computation, the attributes of the
layers, reading and writing records, and opening the stores (docs/guides/vllm.md, "Who shares KV").

    PYTHON_WITH_VLLM -m benchmarks.vllm.probe MODEL [--starts 5]

MODEL is a folder, for example of engine/random_model.py. Each start is a process of its own over the same disk store; the
first finds an empty store. Prints each start's seconds, as the connector logs them, and the median.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile

from benchmarks.harness import median, set_up, table, version_of

_LINE = re.compile(r"namespace ([0-9a-f]+), found and opened in ([0-9.]+) s")


def start(model: str, store: str) -> None:
    """Start vLLM, and end without waiting for its shutdown."""
    from vllm import LLM

    transfer = {
        "kv_connector": "ForewordConnector",
        "kv_connector_module_path": "foreword.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": [f"disk://{store}?size=1GiB"]},
    }
    LLM(model, kv_transfer_config=transfer, enforce_eager=True, kv_cache_memory_bytes=1 << 30, max_model_len=8_192)
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.store:
        start(given.model, given.store)
    variables = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "INFO"}
    rows, seconds = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.starts):
            command = [sys.executable, "-m", "benchmarks.vllm.probe", given.model, "--store", folder]
            done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
            found = _LINE.search(done.stdout + done.stderr)
            if found is None:
                raise SystemExit(f"vLLM did not start:\n{done.stderr[-2_000:]}")
            seconds.append(float(found[2]))
            rows.append([str(number + 1), found[1], found[2]])
            print(f"start {number + 1} of {given.starts}: {found[2]} s", file=sys.stderr, flush=True)
    print(set_up({"model": given.model, "vLLM": version_of("vllm")}))
    print(table(["start", "namespace", "seconds"], rows))
    print(f"median {median(seconds):.2f} s")


if __name__ == "__main__":
    main()
