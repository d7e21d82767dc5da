"""Time to first token of llama.cpp with Foreword's cache, in fresh processes, and the bytes that sessions share.

    python -m benchmarks.engine.llama_cpp_cache FOLDER [--size 370m] [--tokens 4000] [--rounds 5] [--json FILE]

Needs an interpreter with llama-cpp-python (.ci/llama). FOLDER is on a disk; memory is a folder in /dev/shm. The model has
random weights. Each measurement is a process of its own, in turn:

computed  nothing is cached.
file      llama.cpp's own: `llama_state_seq_load_file` of the prefix.
disk      Foreword's cache, in FOLDER.
memory    Foreword's cache, in /dev/shm.

Time runs from the request to the first token, of a prompt of the prefix and 16 more tokens. The model has computed 32 tokens
before, so its weights are in memory; so are the files, in the page cache. Sessions are 20 with a prefix of a quarter of the
tokens and 100 tokens of their own.
"""

import argparse
import ctypes
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.engine.gguf_model import write_random
from benchmarks.engine.random_model import SIZES
from benchmarks.harness import machine, median, set_up, table, version_of, write_figures

MODES = ("computed", "file", "disk", "memory")
SESSIONS, OWN, QUESTION = 20, 100, 16


def prompt_of(length: int, seed: int) -> list[int]:
    """Random tokens."""
    draw = random.Random(seed)
    return [draw.randrange(3, 4000) for _ in range(length)]


def load(job: dict[str, Any]) -> Any:
    """The model, which has computed something."""
    import llama_cpp  # type: ignore[import-not-found,unused-ignore]

    threads = {"n_threads": job["threads"], "n_threads_batch": job["threads"]}
    llm = llama_cpp.Llama(job["model"], n_ctx=job["tokens"] + 512, verbose=False, **threads)
    for _ in range(3):  # a cache computes something when it is made: all have done so
        llm.eval(prompt_of(32, 1))
        llm._ctx.kv_cache_clear()
        llm.reset()
    return llm


def first_token(job: dict[str, Any]) -> dict[str, Any]:
    """One measurement: seconds to the first token, the token, and the seconds that the cache took to open."""
    import llama_cpp

    llm, cache, opened = load(job), None, 0.0
    prompt = prompt_of(job["tokens"], 0) + prompt_of(QUESTION, 2)
    if job["store"]:
        from foreword.integrations.llama_cpp import ForewordCache

        started = time.perf_counter()
        cache = ForewordCache(llm, job["store"])
        opened = time.perf_counter() - started
    started = time.perf_counter()
    if cache is not None:
        assert cache[prompt].n_tokens >= job["tokens"] - 32
    elif job["mode"] == "file":
        held, count = (ctypes.c_int32 * job["tokens"])(), ctypes.c_size_t()
        read = llama_cpp.llama_state_seq_load_file(
            llm.ctx, job["file"].encode(), 0, held, len(held), ctypes.byref(count)
        )
        assert read and count.value == job["tokens"]
        llm.input_ids[: count.value] = held
        llm.n_tokens = count.value
    loaded = time.perf_counter() - started
    token = next(llm.generate(prompt, temp=0.0))
    return {"seconds": time.perf_counter() - started, "loaded": loaded, "token": token, "opened": opened}


def prepare(job: dict[str, Any]) -> dict[str, Any]:
    """Compute the prefix, and save it in each way."""
    import llama_cpp

    from foreword.integrations.llama_cpp import ForewordCache

    llm, prefix = load(job), prompt_of(job["tokens"], 0)
    caches = [ForewordCache(llm, url) for url in job["stores"]]
    llm.eval(prefix)
    llama_cpp.llama_state_seq_save_file(
        llm.ctx, job["file"].encode(), 0, (ctypes.c_int32 * len(prefix))(*prefix), len(prefix)
    )
    seconds = []
    for cache in caches:
        started = time.perf_counter()
        cache[prefix] = llm.save_state()
        seconds.append(time.perf_counter() - started)
        cache.close()
    return {"save": seconds}


def sessions(job: dict[str, Any]) -> dict[str, Any]:
    """Bytes of sessions that share a prefix: in the store, and as llama.cpp's own files would be."""
    import llama_cpp

    from foreword.integrations.llama_cpp import ForewordCache

    llm, shared = load(job), prompt_of(job["tokens"] // 4, 3)
    cache = ForewordCache(llm, job["store"])
    llm.set_cache(cache)
    distinct, files = 0, 0
    for number in range(SESSIONS):
        llm.reset()
        llm.create_completion(shared + prompt_of(OWN, 10 + number), max_tokens=8, temperature=0.0)
        distinct += llm.n_tokens - (len(shared) if number else 0)
        files += llama_cpp.llama_state_seq_get_size(llm.ctx, 0)
    return {"bytes": cache.cache_size, "one": distinct * files / (SESSIONS * llm.n_tokens), "files": files}


STEPS = {"first": first_token, "prepare": prepare, "sessions": sessions}


def run(step: str, job: dict[str, Any]) -> dict[str, Any]:
    """A step in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.engine.llama_cpp_cache", "--step", step, json.dumps(job)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(given: argparse.Namespace, folder: Path, memory: Path) -> tuple[list[list[str]], dict[str, Any]]:
    """The rows of the table, and what they were made of."""
    model = write_random(given.folder / f"{given.size}.gguf", SIZES[given.size])
    urls = {"disk": f"disk://{folder}/kv?size=8GiB", "memory": f"disk://{memory}/kv?size=8GiB"}
    base = {"model": str(model), "tokens": given.tokens, "threads": given.threads, "file": str(folder / "state")}
    saved = run("prepare", {**base, "stores": list(urls.values())})
    times: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for turn in range(given.rounds):
        for mode in (*MODES[turn % len(MODES) :], *MODES[: turn % len(MODES)]):
            if mode != "computed" or turn < given.computed:
                times[mode].append(run("first", {**base, "mode": mode, "store": urls.get(mode)}))
    [token] = {one["token"] for found in times.values() for one in found}
    seconds = {mode: median(one["seconds"] for one in found) for mode, found in times.items()}
    rows = []
    for mode in MODES:
        loading = median(one["loaded"] for one in times[mode])
        ratios = f"{seconds['computed'] / seconds[mode]:.1f}x", f"{seconds[mode] / seconds['file']:.2f}x"
        rows.append([f"first token, {mode}", f"{seconds[mode] * 1e3:.0f} ms", f"{loading * 1e3:.0f} ms", *ratios])
    shared = run("sessions", {**base, "store": f"disk://{folder}/sessions?size=8GiB"})
    stored, files = shared["bytes"] / shared["one"], shared["files"] / shared["one"]
    rows.append(
        [f"{SESSIONS} sessions, bytes stored / one copy of each token", f"{stored:.2f}x", "", "", f"files {files:.2f}x"]
    )
    return rows, {"seconds": seconds, "times": times, "sessions": shared, "saved": saved, "token": token}


def main() -> None:
    """Measures and prints."""
    if sys.argv[1:2] == ["--step"]:
        print(json.dumps(STEPS[sys.argv[2]](json.loads(sys.argv[3]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="370m")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--computed", type=int, default=2, help="rounds in which the prefix is computed too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    folder, memory = (Path(tempfile.mkdtemp(dir=place)) for place in (given.folder.resolve(), "/dev/shm"))
    try:
        rows, measured = measure(given, folder, memory)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(memory)
    facts = {
        **machine(),
        "llama-cpp-python": version_of("llama_cpp_python"),
        "model": given.size,
        "prefix": str(given.tokens),
    }
    head = ["", "time", "of it loading", "faster than computing", "against llama.cpp's file"]
    print(set_up(facts), table(head, rows), sep="\n\n")
    if given.json:
        write_figures(given.json, "llama.cpp", head, rows, facts, **measured)


if __name__ == "__main__":
    main()
