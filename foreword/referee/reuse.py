"""Claims about hits: they give the answers of a computation, for every kind of model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from foreword.referee.models import EMBEDDINGS, LARGE_BLOCKS, Kind, mixed_prompts
from foreword.referee.session import BLOCK, Check, Evidence, RandomPrompts, Session, arguments

_ANSWER: Final = 40
_LONG: Final = (1_900, 1_230, 700, 1_600)
_HOW: Final = {"turn": "in turn", "together": "together"}
_SMALL: Final[dict[str, Any]] = {"kv_cache_memory_bytes": 36 << 20}
# A few more than the longest prompt needs with four KV groups, so memory soon belongs to another request.
_FEW_BLOCKS: Final[dict[str, Any]] = {"num_gpu_blocks_override": 270}


def common(prompt: list[int], earlier: Sequence[list[int]]) -> int:
    """Tokens that a prompt shares with the start of one of the others, at most."""
    return max((_shared(prompt, other) for other in earlier), default=0)


def _shared(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def cold(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """New prompts: attaching the connector changes nothing."""
    asked = draw.prompts()
    found = session.connected().ask_all(asked)
    evidence.must_compute(found, "though they are new", session.reference(asked))


def own(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """Prompts asked twice: vLLM's own cache still works."""
    asked = draw.prompts()
    worker = session.connected()
    worker.ask_all(asked)
    found = worker.ask_all(asked)
    reference = session.reference(asked)
    evidence.must_reuse(found, "the second time", reference)


def reset(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """Prompts asked again after vLLM reset its own cache."""
    asked = draw.prompts()
    worker = session.connected()
    session.store(worker, asked)
    found = worker.ask_all(asked)
    reference = session.reference(asked)
    evidence.must_reuse(found, "after the reset", reference)


def restart(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """Prompts asked again by a new process."""
    asked = draw.prompts()
    session.store(session.connected(), asked)
    found = session.restarted().ask_all(asked)
    reference = session.reference(asked)
    evidence.must_reuse(found, "after the restart", reference)


def boundaries(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """Prompts that diverge around block boundaries: a hit is never longer than the common prefix."""
    worker = session.connected()
    document = draw.tokens("document", 6 * BLOCK + 5)
    session.store(worker, [document])
    cuts = [BLOCK * i + d for i in (1, 2, 3, 5) for d in (-1, 0, 1)]
    asked = [[*document[:cut], (document[cut] % 400) + 1, *draw.tokens(f"end/{cut}", 40)] for cut in cuts]
    asked += [document[:cut] for cut in cuts[-3:]]
    earlier, found, limits = [document], [], []
    for prompt in asked:
        limits.append(common(prompt, earlier))
        found += session.store(worker, [prompt])
        earlier.append(prompt)
    evidence.must_hit(found, "of a prefix")
    evidence.at_most(found, limits)
    evidence.same(found, session.reference(asked))


def position(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """Stored blocks at other positions, and after another prefix: no hit."""
    worker = session.connected()
    document = draw.tokens("document", 6 * BLOCK + 5)
    session.store(worker, [document])
    evidence.must_hit(session.store(worker, [document]), "at the same position")
    asked = [
        [*draw.tokens("before", BLOCK), *document],
        document[BLOCK:],
        [*document[BLOCK : 2 * BLOCK], *document[:BLOCK], *document[2 * BLOCK :]],
        [*draw.tokens("other", BLOCK), *document[BLOCK:]],
    ]
    found = worker.ask_all(asked)
    evidence.at_most(found, [common(prompt, [document, *asked[:i]]) for i, prompt in enumerate(asked)])
    evidence.same(found, session.reference(asked))


def turns(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """Conversations: the next turn contains the answer, whose tokens were computed one by one."""
    worker = session.connected()
    asked = draw.prompts()
    answers = [one["tokens"] for one in session.reference(asked, _ANSWER)]
    following = [
        [*prompt, *answer, *draw.tokens(f"turn/{i}", 40)]
        for i, (prompt, answer) in enumerate(zip(asked, answers, strict=True))
    ]
    reference = session.reference(following)
    # The last token of an answer is computed with the next turn.
    shared = [len(prompt) + _ANSWER - 1 for prompt in asked]
    limits = [{**one, "reusable": length // BLOCK * BLOCK} for one, length in zip(reference, shared, strict=True)]
    session.store(worker, asked, new_tokens=_ANSWER)
    found = worker.ask_all(following)
    evidence.must_hit(found, "of the turn before", limits)
    evidence.at_most(found, shared)
    evidence.same(found, reference)
    if not any(one["cached"] > len(prompt) for one, prompt in zip(found, asked, strict=True)):
        evidence.missing.append("no hit of an answer")


def long(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """Prompts of up to 1,900 tokens with blocks of 512 KiB, in a KV cache for hardly more than one.

    A load has several batches, and memory soon belongs to another request.
    """
    model = session.model(LARGE_BLOCKS.name)
    lengths = _LONG[: len(draw.lengths)]
    asked = [draw.tokens(f"long/{i}", length) for i, length in enumerate(lengths)]
    asked += [prompt[: len(prompt) * 3 // 5] + draw.tokens(f"end/{i}", 90) for i, prompt in enumerate(asked[:2])]
    reference = session.reference(asked, model=model)
    worker = session.connected(model, **_SMALL)
    evidence.same(session.store(worker, asked), reference)
    for how in ("turn", "together"):
        found = session.store(worker, asked, how=how)
        evidence.must_reuse(found, f"asked {_HOW[how]}", reference)


def pooling_claim(kind: str) -> Check:
    """The claim that a server of embeddings lives, and that its vectors are those of vLLM alone."""

    def check(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
        asked = draw.prompts()
        model = session.model(EMBEDDINGS.name)
        given = arguments(EMBEDDINGS, pooler_config={"seq_pooling_type": kind})
        alone = session.alone(model, **given)
        reference, local = alone.ask_all(asked), alone.ask_all(asked)
        worker = session.connected(model, **given)
        evidence.same(session.store(worker, asked), reference)
        found = session.store(worker, asked)
        if any(one["cached"] for one in local):
            evidence.must_hit(found, "after the reset", [{**one, "reusable": one["cached"]} for one in local])
        else:
            evidence.must_miss(found, "though vLLM alone continues no prompt of this model")
        evidence.same(found, reference)

    check.__doc__ = f"Embeddings with {kind} pooling, asked again after a reset."
    return check


def kind_claim(kind: Kind) -> Check:
    """The claim that a kind of model gives right answers cold, from vLLM's own cache, after a reset and after a restart."""

    def check(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
        model = session.model(kind.name)
        asked = mixed_prompts(draw.seed, 8)
        given = arguments(kind)
        alone = session.alone(model, **given)
        computed, local = alone.ask_all(asked), alone.ask_all(asked)
        session.end(connected=False)
        limits = [{**one, "reusable": one["cached"]} for one in local]
        worker = session.connected(model, **given, **_FEW_BLOCKS)
        evidence.same(session.store(worker, asked), computed, kind.exact)
        forgotten = session.store(worker, asked)
        evidence.must_hit(forgotten, "after the reset", limits)
        # A document and a conversation, which share nothing.
        few, right = [asked[0], asked[4]], [computed[0], computed[4]]
        salted = session.store(worker, few, salt="ann")
        evidence.must_miss(salted, "under a salt")
        evidence.same(salted, right, kind.exact)
        salted = worker.ask_all(few, salt="ann")
        evidence.must_hit(salted, "under the salt")
        evidence.same(salted, right, kind.exact)
        worker = session.restarted(model, **given)
        fresh, own = worker.ask_all(asked), worker.ask_all(asked)
        evidence.must_hit(fresh, "after the restart", limits)
        for found in (forgotten, fresh, own):
            evidence.same(found, computed if kind.exact else local, kind.exact)
        counts = [sum(one["cached"] for one in found) for found in (local, forgotten, fresh, own)]
        evidence.notes.append("cached: vLLM alone {:,}; reset {:,}, restart {:,}, own {:,}".format(*counts))

    check.__doc__ = (
        f"{kind.name} ({kind.layers}): in a small KV cache, after its reset, under a salt, after a restart, twice."
    )
    return check
