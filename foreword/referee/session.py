"""The session of the claims of `foreword conform`: the connector under test, its processes, prompts, answers, evidence."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from foreword.config import vllm_batch_invariant
from foreword.errors import ConfigError
from foreword.referee.damage import data_files
from foreword.referee.models import KINDS, Kind, draw_tokens
from foreword.referee.process import (
    HERE,
    START,
    VLLM_MODULES,
    VLLM_VARIABLES,
    WORKER,
    Answer,
    Failed,
    Forks,
    Prompt,
    Refused,
    Worker,
    last_line,
    preload,
)

BLOCK: Final = 32
KV_BYTES: Final = 256 << 20
# vLLM's arguments for two adapters.
LORA: Final[dict[str, Any]] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
# In float32 a hit and a computation differ in the last bits only; tokens are compared exactly. Where vLLM is batch-invariant,
# no bit may differ.
_LOGPROB_WITHIN: Final = 0.0 if vllm_batch_invariant() else 1e-3
_HALF: Final = 0.5
# Random prompts may begin with the same token or two, which an engine that reuses parts of blocks finds.
_CHANCE: Final = 4
_ENGINE_WORKER: Final = HERE / "engine_worker.py"
_ENGINE_MODULES: Final = ("foreword.entrypoints.build_engine",)

Prompts = Sequence[Prompt]


@dataclass(frozen=True)
class Target:
    """The subject of the test.

    Attributes:
        transfer: vLLM's `kv_transfer_config`, or for the embedded engine `{"store": [URL, ...]}`.
        python: the interpreter that has it.
        files: the folder or the file in which it keeps KV; None if that is not known.
        engine: whether it is Foreword's embedded engine.
    """

    transfer: dict[str, Any]
    python: str
    files: Path | None
    engine: bool = False

    @property
    def name(self) -> str:
        return "embedded engine" if self.engine else str(self.transfer.get("kv_connector"))


@dataclass(frozen=True)
class RandomPrompts:
    """Random prompts of a claim: equal seeds and lengths give equal prompts."""

    seed: str
    lengths: tuple[int, ...] = (100, 333, 600, 65)

    def prompts(self, name: str = "") -> list[list[int]]:
        """Prompts, one of each length; another name gives others."""
        return [self.tokens(f"{name}/{i}", length) for i, length in enumerate(self.lengths)]

    def tokens(self, name: str, count: int) -> list[int]:
        return draw_tokens(random.Random(f"{self.seed}/{name}"), count)


@dataclass
class Evidence:
    """Evidence for a claim so far.

    Attributes:
        apart: the largest difference of a log-probability in a right answer, and `wrong_apart` in a wrong one up to its first
            other token.
        failing: indexes of wrong answers' prompts, in the order of the claim's prompts.
        problems: why the claim fails, besides wrong answers.
        missing: positive controls that did not succeed.
    """

    answers: int = 0
    wrong: int = 0
    cached: int = 0
    apart: float = 0.0
    wrong_apart: float = 0.0
    failing: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def same(self, found: Sequence[Answer], reference: Sequence[Answer], exact: bool = True) -> None:
        """Compare tokens, and the log-probabilities of equal ones. Not `exact`: only answers with equal cached tokens."""
        for index, (mine, theirs) in enumerate(zip(found, reference, strict=True)):
            self.cached += mine["cached"]
            if not exact and mine["cached"] != theirs["cached"]:
                continue
            self.answers += 1
            apart = _apart(mine, theirs)
            if mine["tokens"] == theirs["tokens"] and apart <= _LOGPROB_WITHIN:
                self.apart = max(self.apart, apart)
            else:
                self.wrong += 1
                self.failing.append(index)
                self.wrong_apart = max(self.wrong_apart, apart)

    def must_hit(self, found: Sequence[Answer], when: str, alone: Sequence[Answer] = ()) -> None:
        """The positive control. `alone` is what `Session.reference` says about these prompts: a target that finds fewer than
        half of the tokens that vLLM alone finds when it is asked twice has lost hits."""
        if any(one["cached"] for one in found):
            self.must_find(found, [one["reusable"] for one in alone], when, _HALF)
        else:
            self.missing.append(f"no hit {when}")

    def must_find(self, found: Sequence[Answer], tokens: Sequence[int], when: str, share: float) -> None:
        """At least `share` of these cached tokens, which a target has shown that it can find."""
        hits = sum(one["cached"] for one in found)
        if hits < share * sum(tokens):
            pairs = enumerate(zip(found, tokens, strict=True))
            self.failing += [index for index, (one, most) in pairs if one["cached"] < most]
            self.problems.append(f"finds {hits:,} tokens {when}, where {sum(tokens):,} can be found")

    def must_miss(self, found: Sequence[Answer], when: str) -> None:
        """The negative control."""
        hits = [index for index, one in enumerate(found) if one["cached"] >= _CHANCE]
        self.failing += hits
        if hits:
            self.problems.append(f"{len(hits)} of {len(found)} hit {when}")

    def must_reuse(self, found: Sequence[Answer], when: str, reference: Sequence[Answer]) -> None:
        """Hits with the right answers, those of `Session.reference`."""
        self.must_hit(found, when, reference)
        self.same(found, reference)

    def must_compute(self, found: Sequence[Answer], when: str, right: Sequence[Answer]) -> None:
        """No hits, and the right answers."""
        self.must_miss(found, when)
        self.same(found, right)

    def at_most(self, found: Sequence[Answer], limits: Sequence[int]) -> None:
        """No hit is longer than what the prompt shares with earlier ones."""
        long = [i for i, (one, most) in enumerate(zip(found, limits, strict=True)) if one["cached"] > most]
        self.failing += long
        if long:
            self.problems.append(f"{len(long)} hits are longer than the common prefix")

    @staticmethod
    def differ(one: Sequence[Answer], other: Sequence[Answer]) -> bool:
        """Whether answers differ, so that something that changes them was shown to."""
        evidence = Evidence()
        evidence.same(one, other)
        return evidence.wrong > 0

    @property
    def result(self) -> str:
        if self.wrong or self.problems:
            return "FAIL"
        return "not shown" if self.missing else "pass"

    @property
    def figure(self) -> str:
        found = [*self.problems, *self.missing]
        if self.answers:
            apart = f"up to {self.wrong_apart:.1g}" if self.wrong else f"at most {self.apart:.0e}"
            found.append(f"{self.wrong} of {self.answers} answers wrong, with log-probabilities {apart} apart")
            found.append(f"{self.cached:,} cached tokens")
        return "; ".join([*found, *self.notes])


def _apart(one: Answer, other: Answer) -> float:
    """How far the log-probabilities of two answers are apart, up to the first other token."""
    alike = next((i for i, (a, b) in enumerate(zip(one["tokens"], other["tokens"], strict=True)) if a != b), None)
    pairs = list(zip(one["logprobs"], other["logprobs"], strict=True))[: None if alike is None else alike + 1]
    return max((abs(a - b) for a, b in pairs), default=0.0)


class Session:
    """The processes of a run. One with the connector and one of vLLM alone stay alive between claims.

    Attributes:
        folder: temporary files: models, logs.
        transcript: what was said to the processes with the connector since the claim began.
    """

    def __init__(self, target: Target, folder: Path) -> None:
        self.target = target
        self.folder = folder
        self.transcript: list[str] = []
        self._live: dict[bool, tuple[str, Worker]] = {}
        self._answers: dict[str, Answer] = {}
        self._started: set[str] = set()
        self._written: dict[str, tuple[list[Answer], list[Answer]]] = {}
        self._ended_cpu = 0.0
        environment = {**os.environ, **preload(target.python), **VLLM_VARIABLES}
        modules = _ENGINE_MODULES if target.engine else VLLM_MODULES
        # Processes after a restart are forked from another one, which shares nothing with the first, Python's hash seed
        # included.
        self._forks, self._others = (Forks(target.python, environment, modules) for _ in range(2))

    def use(self, target: Target) -> None:
        """Go on with another connector under the same interpreter; models and reference answers are kept."""
        self.end(connected=True, kill=True)
        self.target = target
        self._started.clear()
        self._written.clear()

    def model(self, name: str = "Llama", seed: int = 0, config: Mapping[str, Any] | None = None) -> Path:
        """The folder of a random model; made when it is needed first. The embedded engine uses its embedded model.

        `config`: keys of its `config.json` that are other than usual.
        """
        if self.target.engine:
            return self.folder
        made = self.folder / f"{name}-{seed}"
        if not made.exists():
            self._script(name, str(made), str(seed))
        return made if not config else self.copy(made, config)

    def copy(self, model: Path, config: Mapping[str, Any]) -> Path:
        """A copy of a model's folder with other values of these keys of `config.json`."""
        text = json.dumps(config, sort_keys=True)
        made = self.folder / f"{model.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        if not made.exists():
            shutil.copytree(model, made)
            path = made / "config.json"
            path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **config}), encoding="utf-8")
        return made

    def adapter(self, seed: int, model: Path | None = None) -> Path:
        """The folder of a LoRA adapter of a model, by default of the Llama."""
        model = model or self.model()
        made = self.folder / f"adapter-{model.name}-{seed}"
        if not made.exists():
            self._script("adapter", str(made), str(model), str(seed))
        return made

    def _script(self, *arguments: str) -> None:
        log = self.folder / "models.log"
        with log.open("w") as file:
            script = self._forks.start([str(HERE / "models.py"), *arguments], stdout=file, stderr=file)
        if script.wait(START):
            raise Failed(f"cannot make a model: {last_line(log)}")

    def connected(self, model: Path | None = None, **llm: Any) -> Worker:
        """The process with the connector; one with other settings is ended first. Raises Failed.

        Besides vLLM's arguments, `llm` may have `variables`, a dictionary for the environment, and `extra`, more keys of
        `kv_connector_extra_config`.
        """
        return self._worker(True, model, llm, self._forks)

    def alone(self, model: Path | None = None, **llm: Any) -> Worker:
        """This session without a connector."""
        return self._worker(False, model, llm, self._forks)

    def restarted(self, model: Path | None = None, **llm: Any) -> Worker:
        """A new process with the connector, which shares nothing with the one before, Python's hash seed included."""
        self.end(connected=True)
        return self._worker(True, model, llm, self._others)

    def _job(self, connected: bool, model: Path | None, llm: Mapping[str, Any]) -> dict[str, Any]:
        given = arguments(KINDS["Llama"], **llm)
        extra = given.pop("extra", {})
        given.pop("variables", None)
        transfer = self.target.transfer if connected else None
        if transfer is not None and extra:
            mine = transfer.get("kv_connector_extra_config", {})
            transfer = {**transfer, "kv_connector_extra_config": {**mine, **extra}}
        return {"model": str(model or self.model()), "transfer": transfer, "llm": given}

    def _worker(self, connected: bool, model: Path | None, llm: Mapping[str, Any], forks: Forks) -> Worker:
        job, variables = self._job(connected, model, llm), llm.get("variables")
        key = json.dumps([job, variables], sort_keys=True)
        if connected in self._live:
            known, worker = self._live[connected]
            if known == key:
                return worker
            self.end(connected=connected)
        log = self.folder / ("connected.log" if connected else "alone.log")
        if connected:
            self.transcript.append(f"start {json.dumps(job)}" + (f" with {json.dumps(variables)}" if variables else ""))
        script = _ENGINE_WORKER if self.target.engine else WORKER
        try:
            worker = Worker.start(self.target.python, job, log, script=script, variables=variables, forks=forks)
        except Failed as error:
            # With settings that worked before, it is the claim's fault (a damaged file, a restart) that it does not start.
            raise error if key in self._started else Refused(f"does not start: {error.message}") from None
        self._started.add(key)
        if connected:
            worker.transcript = self.transcript
        self._live[connected] = key, worker
        return worker

    def end(self, *, connected: bool, kill: bool = False) -> None:
        """End a process; `kill`: without warning."""
        if connected in self._live:
            _, worker = self._live.pop(connected)
            if connected:
                self.transcript.append("kill -9" if kill else "end")
            worker.kill() if kill else worker.close()
            self._ended_cpu += worker.cpu

    @property
    def cpu_seconds(self) -> float:
        """Processor seconds of all vLLM processes until now, without the imports that they share."""
        return self._ended_cpu + sum(worker.cpu for _, worker in self._live.values())

    def stop(self) -> None:
        """End both processes without warning."""
        for connected in (True, False):
            self.end(connected=connected, kill=True)

    def close(self) -> None:
        """Also end what starts processes."""
        self.stop()
        self._forks.close()
        self._others.close()

    def begin(self) -> None:
        """A new claim."""
        self.transcript.clear()
        if True in self._live:
            self.transcript.append(f"started before: {self._live[True][0]}")

    def reference(self, prompts: Prompts, new_tokens: int = 8, model: Path | None = None, **llm: Any) -> list[Answer]:
        """Answers of vLLM alone, computed without any cache. `reusable` of each: cached tokens when it is asked once more."""
        where = json.dumps([self._job(False, model, llm), new_tokens])
        keys = [f"{where} {json.dumps(prompt)}" for prompt in prompts]
        for key, prompt in zip(keys, prompts, strict=True):
            if key not in self._answers:
                worker = self.alone(model, **llm)
                worker.forget()
                found = worker.ask(prompt, new_tokens)
                self._answers[key] = {**found, "reusable": worker.ask(prompt, 1)["cached"]}
        return [self._answers[key] for key in keys]

    def computed(self, worker: Worker, prompts: Prompts, model: Path | None = None, **llm: Any) -> list[Answer]:
        """Answers that are computed without what was stored: by the process itself under a new salt, which saves the start of
        another one; by vLLM alone if that hits."""
        found = worker.ask_all(prompts, salt=f"computed {os.urandom(8).hex()}")
        if any(one["cached"] >= _CHANCE for one in found):
            return self.alone(model, **llm).ask_all(prompts)
        return found

    def written(self, prompts: Prompts, model: Path | None = None, **llm: Any) -> tuple[list[Answer], list[Answer]]:
        """Make a process with these settings store prompts, or know that one has done it: its answers, and those to the same
        prompts after vLLM reset its own cache."""
        key = json.dumps([self._job(True, model, llm), llm.get("variables"), list(prompts)], sort_keys=True)
        if key not in self._written:
            worker = self.connected(model, **llm)
            self._written[key] = self.store(worker, prompts), self.store(worker, prompts)
        return self._written[key]

    def store(self, worker: Worker, prompts: Prompts, **how: Any) -> list[Answer]:
        """Ask, wait until it is written, and reset vLLM's own cache."""
        found = worker.ask_all(prompts, **how)
        worker.settle()
        worker.forget()
        return found

    @contextlib.contextmanager
    def small_disk(self, size: int) -> Iterator[bool]:
        """A file system of `size` bytes in place of the target's folder. Yields False where none can be mounted."""
        files = self.target.files
        if files is None or files.is_file() or shutil.which("mount") is None:
            yield False
            return
        files.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "foreword-conform", str(files)]
        mounted = None  # whether it is mounted is not known where a signal ends the command meanwhile
        try:
            mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
            yield mounted
        finally:
            if mounted:
                self._written.clear()
                self.end(connected=True, kill=True)
            if mounted is not False:
                subprocess.run(["umount", "-l", str(files)], capture_output=not mounted, check=bool(mounted))

    def damage(self, change: Callable[[Path], int]) -> int:
        """Damage the files, and return how much was changed."""
        files = self.target.files
        self._written.clear()
        done = change(files) if files is not None and files.exists() else 0
        self.transcript.append(f"{change.__name__}({str(files)!r}): {done}")
        return done

    def data_bytes(self) -> int:
        """Bytes of KV in files."""
        files = self.target.files
        if files is None or not files.exists():
            return 0
        total = 0
        for path in data_files(files):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        return total


def arguments(kind: Kind, **more: Any) -> dict[str, Any]:
    """vLLM's arguments for a kind of model."""
    given = {"block_size": BLOCK, "kv_cache_memory_bytes": KV_BYTES, "max_num_seqs": 8, "max_num_batched_tokens": 2048}
    return {**given, "dtype": kind.dtype, "max_model_len": 2_048, **kind.llm, **more}


def environment_note(python: str) -> str:
    """Versions of what an interpreter has, for reports. Raises ConfigError if it cannot be run."""
    names = ["vllm", "torch", "foreword", "lmcache", "mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"]
    program = (
        "import sys\nfrom importlib import metadata\nfound = []\nfor name in sys.argv[1:]:\n"
        "    try: found.append(f'{name} {metadata.version(name)}')\n"
        "    except metadata.PackageNotFoundError: pass\nprint(', '.join(found))"
    )
    try:
        done = subprocess.run([python, "-c", program, *names], capture_output=True, text=True, check=False, timeout=60)
    except OSError as error:
        raise ConfigError(f"cannot run {python}: {error.strerror}") from None
    return done.stdout.strip() or "no versions found"


def check_modules(python: str, modules: Sequence[str]) -> None:
    """Raises ConfigError if an interpreter lacks one of these modules: no claim would start, one after the other."""
    program = (
        "import sys\nfrom importlib.util import find_spec\nfor name in sys.argv[1:]:\n"
        "    try: found = find_spec(name)\n    except ImportError: found = None\n    if found is None: print(name)"
    )
    try:
        command = [python, "-P", "-c", program, *modules]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except OSError as error:
        raise ConfigError(f"cannot run {python}: {error.strerror}") from None
    if missing := done.stdout.split():
        raise ConfigError(f"{python} has no module {missing[0]}: install it there, or give its folder in PYTHONPATH")


# A claim: notes in the evidence what processes of the session say to prompts that are drawn.
Check = Callable[[Session, RandomPrompts, Evidence], None]
