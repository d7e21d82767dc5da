"""Requests that sample more sequences than they return: the likeliest ones are chosen when all have ended. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from foreword.engine.request import Delta, Request, SamplingParams


def sampled_params(params: SamplingParams) -> SamplingParams:
    """Parameters with which the sequences are sampled: choosing needs their log-probabilities."""
    if params.best_of is None or params.best_of == params.n or params.logprobs is not None:
        return params
    return replace(params, logprobs=0)


@dataclass(slots=True)
class _Candidate:
    """A sequence: its delta so far, all tokens and text in one."""

    whole: Delta
    parts: list[str] = field(default_factory=list)
    logprob: float = 0.0

    def add(self, delta: Delta) -> None:
        self.parts.append(delta.text)
        self.logprob += sum(one.logprob for one in delta.logprobs)
        before = self.whole
        self.whole = replace(
            delta,
            tokens=before.tokens + delta.tokens,
            logprobs=before.logprobs + delta.logprobs,
            prompt_logprobs=before.prompt_logprobs or delta.prompt_logprobs,
        )

    @property
    def mean(self) -> float:
        return self.logprob / max(len(self.whole.tokens), 1)


class BestOf:
    """Holds back the deltas of such requests, and passes on all others."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Request, dict[int, _Candidate]]] = {}

    def add(self, request: Request) -> None:
        if request.params.num_sequences > request.params.n:
            self._open[request.id] = (request, {})

    def pass_on(self, deltas: Iterable[Delta]) -> list[Delta]:
        """The deltas to be delivered now."""
        passed: list[Delta] = []
        for delta in deltas:
            if delta.request_id not in self._open:
                passed.append(delta)
            elif delta.finish_reason == "error":
                del self._open[delta.request_id]
                passed.append(replace(delta, index=0))
            else:
                passed += self._hold(delta)
        return passed

    def _hold(self, delta: Delta) -> list[Delta]:
        request, candidates = self._open[delta.request_id]
        if delta.index not in candidates:
            candidates[delta.index] = _Candidate(Delta(delta.request_id, delta.index, (), ""))
        candidates[delta.index].add(delta)
        ended = [one for one in candidates.values() if one.whole.finish_reason is not None]
        if len(ended) < request.params.num_sequences:
            return []
        del self._open[delta.request_id]
        best = sorted(ended, key=lambda one: (-one.mean, one.whole.index))[: request.params.n]
        report = candidates[0].whole
        return [
            replace(
                one.whole,
                index=index,
                text="".join(one.parts),
                logprobs=() if request.params.logprobs is None else one.whole.logprobs,
                cached_tokens=report.cached_tokens,
                cache_report=report.cache_report,
            )
            for index, one in enumerate(best)
        ]
