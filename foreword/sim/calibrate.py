"""Measure the costs of steps and loads of a real engine on this machine (`foreword calibrate`)."""

from __future__ import annotations

import os
import platform
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from statistics import median
from typing import Final

from foreword import __version__
from foreword.compiled_code import processor_field
from foreword.engine_config import Dtype, EngineConfig
from foreword.errors import ConfigError
from foreword.events import Event, FirstToken, PrefixLookup, StepFinished
from foreword.routing.costs import LoadCost, pairs
from foreword.sim.costs import EngineCosts, Profile
from foreword.store.types import Reach
from foreword.store.urls import parse

_BATCHES: Final = (1, 2, 4, 8, 16)
_DECODED: Final = 12
_SHORT: Final = (16, 64, 256)
_SHORTEST: Final = 512
# Bytes of KV per token of the model behind the default costs.
_DEFAULT_KV_BYTES: Final = 327_680
_TIER_OF: Final = {Reach.PROCESS: 0, Reach.HOST: 1}
_FLUSH_SECONDS: Final = 120.0
# Relative error that a sample has at least.
_NOISE: Final = 0.01
# A term must be this many times its standard error.
_SIGNIFICANT: Final = 2.0
_PREFILL_TERM: Final = 1
_ATTENTION_TERM: Final = 2
_REWEIGHTINGS: Final = 8
# Terms of a step by column, with the term that contains them if they are left out.
_LEFT_OUT: Final = {
    0: ("base", "cost of a token or a sequence"),
    2: ("attention", "cost of a prefilled token"),
    3: ("decode_each", "fixed cost"),
    4: ("decode_context", "cost of a decoding sequence"),
}


@dataclass(frozen=True, slots=True)
class CalibrationSetup:
    """Settings of a calibration.

    Attributes:
        stores: URLs of stores; by default memory and a temporary folder.
        longest: longest context in tokens.
        rounds: repetitions after a warm-up; the result is the median.

    Raises ConfigError for sizes that are too small.
    """

    model: str | None = None
    stores: Sequence[str] = ()
    threads: int | None = None
    dtype: Dtype = "auto"
    block_size: int = 16
    max_batch_tokens: int = 512
    longest: int = 4096
    rounds: int = 3

    def __post_init__(self) -> None:
        if self.longest < _SHORTEST or self.rounds < 1:
            raise ConfigError(f"measure contexts of at least {_SHORTEST} tokens (--longest), at least once (--rounds)")


@dataclass(frozen=True, slots=True)
class StepSample:
    """A measured step: prefilled tokens, pairs of them with tokens before them, decoding sequences, and their total
    context."""

    tokens: float
    pairs: float
    decoding: float
    context: float

    @property
    def row(self) -> tuple[float, ...]:
        return (1.0, self.tokens, self.pairs, self.decoding, self.context)


class _MeasuredEngine:
    """The engine to measure. It observes its events and keeps those of the last `generate`.

    Attributes:
        steps: finished steps.
        ttfts: times to first token.
        loaded: prompt tokens that were loaded from the store.
    """

    def __init__(self, setup: CalibrationSetup, store: str | None = None) -> None:
        from foreword.entrypoints.llm import LLM

        self.steps: list[StepFinished] = []
        self.ttfts: list[float] = []
        self.loaded = 0
        self._rng = random.Random(0)
        pool_tokens = max(2 * setup.longest, (_BATCHES[-1] + 1) * (setup.longest // 2 + 64))
        self.llm = LLM(
            setup.model,
            store=(store,) if store is not None else (),
            observers=[self],
            threads=setup.threads,
            dtype=setup.dtype,
            block_size=setup.block_size,
            max_batch_tokens=setup.max_batch_tokens,
            max_num_seqs=_BATCHES[-1],
            kv_memory=f"{pool_tokens} tokens",
            self_check=False,
            seed=0,
        )

    def notify(self, event: Event) -> None:
        if isinstance(event, StepFinished):
            self.steps.append(event)
        elif isinstance(event, FirstToken):
            self.ttfts.append(event.seconds)
        elif isinstance(event, PrefixLookup):
            self.loaded = sum(tokens for _, tokens in event.loaded_tokens)

    def prompt(self, length: int) -> list[int]:
        """Random tokens."""
        return [self._rng.randrange(self.llm.info.vocab_size) for _ in range(length)]

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        from foreword.engine.request import SamplingParams

        self.steps.clear()
        self.ttfts.clear()
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self.llm.generate([list(prompt) for prompt in prompts], params)

    def close(self) -> None:
        self.llm.close()


def measure(setup: CalibrationSetup, report: Callable[[str], None] = lambda _: None) -> Profile:
    """Load the model and measure it. Takes minutes on a CPU; nothing else should run then. Raises ForewordError."""
    with closing(_MeasuredEngine(setup)) as engine:
        info = engine.llm.info
        longest = min(setup.longest, info.max_model_len - _DECODED - 1)
        if longest < _SHORTEST:
            raise ConfigError(f"{info.name} has a maximum length of {info.max_model_len} tokens: too short to measure")
        setup = replace(setup, longest=longest)
        report(f"{info.name}, {info.parameters / 1e6:.0f}M parameters, {info.dtype} on {info.device}")
        times = _steps(engine, setup, report)
        bytes_per_token = info.kv_bytes_per_token
        model = f"{info.name}, {info.parameters} parameters, {info.dtype} on {info.device}"
    fitted = fit(times)
    report(f"steps: fitted within {fitted.median_error:.1%} at the median, {fitted.worst_error:.1%} at worst")
    loads, notes = _loads(setup, bytes_per_token, report)
    about = {
        "model": model,
        "machine": _machine(),
        "threads": setup.threads or os.cpu_count() or 1,
        "measured": time.strftime("%Y-%m-%d"),
        "foreword": __version__,
        "torch": version("torch"),
        "longest_context": setup.longest,
        "rounds": setup.rounds,
        "steps_median_error": round(fitted.median_error, 4),
        "steps_worst_error": round(fitted.worst_error, 4),
        "terms": fitted.notes,
        "loads": notes,
    }
    return Profile(
        replace(fitted.costs, loads=loads),
        bytes_per_token,
        setup.block_size,
        setup.max_batch_tokens,
        EngineConfig().max_num_seqs,
        about,
    )


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted costs of steps.

    Attributes:
        median_error, worst_error: relative errors of the samples.
        notes: by name, the terms that the samples do not show, and are 0 for that reason.
    """

    costs: EngineCosts
    median_error: float
    worst_error: float
    notes: Mapping[str, str]


def fit(times: Sequence[tuple[StepSample, float]]) -> Fit:
    """Fit the costs of steps by least squares of the errors relative to the fitted times.

    Relative to the measured times, slow steps would count less than fast ones, and noisy measurements give costs that are too
    low. So the weights are renewed with each fit (iteratively reweighted least squares).

    A term that is negative, or less than twice its standard error, is left out; the other terms then contain it. Raises
    ConfigError if the samples do not determine the cost of a prefilled token.
    """
    import numpy as np

    rows = np.array([sample.row for sample, _ in times])
    seconds = np.array([value for _, value in times])
    scales = np.abs(rows).max(axis=0)
    scales[scales == 0] = 1.0
    columns = list(range(rows.shape[1]))
    while True:
        fitted = seconds
        for _ in range(_REWEIGHTINGS):
            chosen, measured = (rows / scales)[:, columns] / fitted[:, None], seconds / fitted
            found = np.linalg.lstsq(chosen, measured, rcond=None)[0]
            fitted, errors = np.clip(chosen @ found * fitted, seconds / 8, seconds * 8), chosen @ found - measured
        variance = max(float((errors**2).mean()), _NOISE**2)
        products = chosen.T @ chosen
        # Columns that depend on each other get a large standard error in place of no inverse.
        products += 1e-9 * np.trace(products) * np.eye(len(columns))
        spread = np.sqrt(np.diag(np.linalg.inv(products)) * variance)
        certainty = dict(zip(columns, found / spread, strict=True))
        term = min((column for column in columns if column != _PREFILL_TERM), key=certainty.__getitem__, default=None)
        if term is not None and certainty[term] < _SIGNIFICANT:
            columns.remove(term)
        elif _ATTENTION_TERM in columns and certainty[_PREFILL_TERM] <= 0:
            columns.remove(_ATTENTION_TERM)
        else:
            break
    # Where the cost of pairs is certain, so is that of a prompt.
    if certainty[_PREFILL_TERM] < _SIGNIFICANT and _ATTENTION_TERM not in columns:
        raise ConfigError(
            "the measurements do not determine the cost of a prefilled token: there are too few prompts of different "
            "lengths, or something else runs on this machine"
        )
    values = np.zeros(rows.shape[1])
    values[columns] = found / scales[columns]
    base, prefill, attention, each, context = map(float, values)
    costs = EngineCosts(base, prefill, attention, each, context)
    errors = np.abs(rows @ values - seconds) / seconds
    absent = [one for column, one in _LEFT_OUT.items() if column not in columns]
    notes = {name: f"not visible in the measurements: part of the {other}" for name, other in absent}
    return Fit(costs, float(np.median(errors)), float(errors.max()), notes)


def _steps(
    engine: _MeasuredEngine, setup: CalibrationSetup, report: Callable[[str], None]
) -> list[tuple[StepSample, float]]:
    seen: dict[StepSample, list[float]] = {}
    for number in range(setup.rounds + 1):
        found = [*_prefill(engine, setup), *_decode(engine, setup)]
        report(f"steps: round {number} of {setup.rounds}, {len(found)} measured" + ("" if number else " (warming up)"))
        for sample, seconds in found if number else ():
            seen.setdefault(sample, []).append(seconds)
    return [(sample, median(values)) for sample, values in seen.items()]


def _prefill(engine: _MeasuredEngine, setup: CalibrationSetup) -> Iterator[tuple[StepSample, float]]:
    for length in (*_SHORT, setup.longest // 4, setup.longest):
        engine.generate([engine.prompt(length)], 1)
        before = 0
        for step in engine.steps:
            count = step.prefill_tokens
            if count > 1:
                yield StepSample(count, pairs(count, before), 0, 0), step.seconds
            before += count


def _decode(engine: _MeasuredEngine, setup: CalibrationSetup) -> Iterator[tuple[StepSample, float]]:
    for context in (64, setup.longest // 2):
        for batch in _BATCHES:
            engine.generate([engine.prompt(context) for _ in range(batch)], _DECODED)
            steps = [one.seconds for one in engine.steps if one.decode_tokens == batch and not one.prefill_tokens]
            if steps:
                yield StepSample(0, 0, batch, batch * (context + _DECODED // 2)), median(steps)


def _loads(
    setup: CalibrationSetup, bytes_per_token: int, report: Callable[[str], None]
) -> tuple[tuple[LoadCost, ...], dict[str, str]]:
    """Costs of loads by tier. Costs that are not measured are the defaults, in proportion to the bytes of a token."""
    scale = bytes_per_token / _DEFAULT_KV_BYTES
    loads = [LoadCost(one.per_token * scale, one.latency) for one in EngineCosts().loads]
    notes = dict.fromkeys(("memory", "disk", "shared"), "not measured: default, in proportion to the bytes")
    with tempfile.TemporaryDirectory(prefix="foreword-calibrate-") as folder:
        size = 4 * setup.longest * bytes_per_token
        for url in setup.stores or (f"memory://?size={size}", f"disk://{folder}?size={max(size, 1 << 28)}"):
            parsed = parse(url)
            tier = _TIER_OF.get(parsed.reach, 2)
            load = _load(setup, url)
            name = tuple(notes)[tier]
            if load is None:
                report(f"{name}: computing is faster than loading here; nothing was loaded")
                continue
            loads[tier], notes[name] = load, f"measured with {parsed.scheme}://"
            rate = bytes_per_token / load.per_token / 1e9 if load.per_token else float("inf")
            report(
                f"{name}: {load.per_token * 1e6:.2f} us a token ({rate:.2f} GB/s), {load.latency * 1e3:.2f} ms each time"
            )
    return tuple(loads), notes


def _load(setup: CalibrationSetup, url: str) -> LoadCost | None:
    """Load cost of a store, from the time to first token of prompts in the store and on the device. None if nothing was loaded.

    The differences at two lengths give a line: latency and seconds per token.
    """
    points: list[tuple[int, float]] = []
    with closing(_MeasuredEngine(setup, url)) as engine:
        for length in (setup.longest // 4, setup.longest // 2, setup.longest):
            prompt = engine.prompt(length)
            engine.generate([prompt], 1)
            times: list[float] = []
            for number in range(setup.rounds + 1):
                engine.llm.flush(_FLUSH_SECONDS)
                engine.llm.clear_cache()
                engine.generate([prompt], 1)
                loaded, seconds = engine.loaded, engine.ttfts[0]
                # The same prompt from the device: the difference is the load.
                engine.generate([prompt], 1)
                if number and loaded * 2 > length:
                    times.append(max(seconds - engine.ttfts[0], 0.0))
            if times:
                points.append((length, median(times)))
    if not points:
        return None
    (short, quick), (long, slow) = points[0], points[-1]
    per_token = max(slow - quick, 0.0) / (long - short) if long > short else slow / long
    return LoadCost(per_token or slow / long, max(quick - per_token * short, 0.0))


def _machine() -> str:
    name = processor_field("model name") or platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {platform.system()}"
