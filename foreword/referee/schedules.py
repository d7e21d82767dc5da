"""Claims about schedules: requests that are chunked, run together, are aborted, preempted or drafted, and what they stored."""

from __future__ import annotations

from typing import Any, Final

from foreword.referee.models import fresh_prompts
from foreword.referee.session import Check, Evidence, RandomPrompts, Session

_NEW = 24
_LONG = 80
_FEW = 3
# A step ends inside a block. The KV cache has 70 blocks, so memory soon belongs to another request.
_CHUNKS: Final[dict[str, Any]] = {
    "max_num_batched_tokens": 72,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 70 * 49_152,
}
# Two thirds of what `pressed` needs at its end, so that vLLM preempts, and memory of the preempted belongs to others at once.
_PRESSED: Final[dict[str, Any]] = {"max_num_seqs": 32, "max_model_len": 1024, "kv_cache_memory_bytes": 80 * 49_152}
_DRAFTS: Final[dict[str, Any]] = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    },
    "max_model_len": 1024,
}


def scheduled(how: str, text: str, *, chunks: bool = True, copies: int = 1, counted: str = "") -> Check:
    """The claim that prompts asked like this get the right answers, and that what they stored gives right answers too.

    `counted`: what must have happened at least once: "preempted" or "drafted".
    """

    def check(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
        asked = fresh_prompts(draw.seed, len(draw.lengths), 400) * copies
        reference = session.reference(asked, _NEW)
        worker = session.connected(**(_CHUNKS if chunks else _DRAFTS))
        answer = worker.tell({"ask": asked, "new_tokens": _NEW, "how": how})
        evidence.same(answer["results"], reference)
        if counted:
            evidence.notes.append(f"{answer[counted]:,} {counted}")
            if not answer[counted]:
                evidence.missing.append(f"nothing was {counted}")
        worker.settle()
        worker.forget()
        found = session.store(worker, asked, new_tokens=_NEW)
        evidence.must_reuse(found, "on what was stored", reference)
        # Blocks that decoding has filled: the next turn contains the answer.
        prompts = asked[: len(draw.lengths)]
        turns = [[*prompt, *one["tokens"], 1] for prompt, one in zip(prompts, reference, strict=False)]
        found = worker.ask_all(turns)
        evidence.at_most(found, [len(prompt) + _NEW for prompt in prompts])
        evidence.same(found, session.reference(turns))

    check.__doc__ = text
    return check


chunked = scheduled("turn", "Chunked prefill: prompts of 400 tokens in steps of 72.")
together = scheduled("together", "Identical prompts at the same time.", copies=2)
aborted = scheduled("abort", "Requests aborted before and in prefill, and asked again.")
preempted = scheduled("preempt", "All requests preempted and resumed.", counted="preempted")
drafted = scheduled("steps", "Speculative decoding with n-grams.", chunks=False, counted="drafted")


def pressed(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """Answers that outgrow memory: vLLM preempts requests and gives their blocks to others; then the next turns."""
    asked = [draw.tokens(f"pressed/{number}", 40 + 2 * number) for number in range(6 * len(draw.lengths))]
    reference = session.reference(asked, _LONG)
    worker = session.connected(**_PRESSED)
    answer = worker.tell({"ask": asked, "new_tokens": _LONG, "how": "steps"})
    evidence.same(answer["results"], reference)
    evidence.notes.append(f"{answer['preempted']:,} preempted")
    if not answer["preempted"]:
        evidence.missing.append("nothing was preempted")
    worker.settle()
    worker.forget()
    turns = [[*prompt, *one["tokens"], 1] for prompt, one in zip(asked, reference, strict=True)]
    expected = session.reference(turns)
    found = worker.ask_all(turns)
    evidence.must_reuse(found, "of answers", expected)


def many(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """A hundred different prompts at the same time, in a KV cache for a fifth of them; then asked again twice."""
    asked = [draw.tokens(f"many/{number}", 33 + 2 * number) for number in range(25 * len(draw.lengths))]
    reference = session.reference(asked, _FEW)
    worker = session.connected(**_CHUNKS)
    evidence.same(session.store(worker, asked, new_tokens=_FEW, how="together"), reference)
    for _ in range(2):
        found = session.store(worker, asked, new_tokens=_FEW, how="together")
        evidence.must_reuse(found, "at the same time", reference)
