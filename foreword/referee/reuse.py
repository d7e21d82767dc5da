"""Claims about hits: they give the answers of a computation, for every kind of model."""

from __future__ import annotations

from collections.abc import Callable

from foreword.referee.models import Kind, mixed_prompts
from foreword.referee.session import BLOCK, Draw, Evidence, Prompts, Session, arguments


def common(prompt: list[int], earlier: Prompts) -> int:
    """Tokens that a prompt shares with the start of one of the others, at most."""
    return max((_shared(prompt, other) for other in earlier), default=0)


def _shared(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def cold(session: Session, draw: Draw) -> Evidence:
    """New prompts: attaching the connector changes nothing."""
    evidence, asked = Evidence(), draw.prompts()
    found = session.connected().ask_all(asked)
    evidence.must_miss(found, "though they are new")
    evidence.same(found, session.reference(asked))
    return evidence


def own(session: Session, draw: Draw) -> Evidence:
    """Prompts asked twice: vLLM's own cache still works."""
    evidence, asked = Evidence(), draw.prompts()
    worker = session.connected()
    worker.ask_all(asked)
    found = worker.ask_all(asked)
    evidence.must_hit(found, "the second time")
    evidence.same(found, session.reference(asked))
    return evidence


def reset(session: Session, draw: Draw) -> Evidence:
    """Prompts asked again after vLLM reset its own cache."""
    evidence, asked = Evidence(), draw.prompts()
    worker = session.connected()
    session.store(worker, asked)
    found = worker.ask_all(asked)
    evidence.must_hit(found, "after the reset")
    evidence.same(found, session.reference(asked))
    return evidence


def restart(session: Session, draw: Draw) -> Evidence:
    """Prompts asked again by a new process."""
    evidence, asked = Evidence(), draw.prompts()
    session.store(session.connected(), asked)
    found = session.restarted().ask_all(asked)
    evidence.must_hit(found, "after the restart")
    evidence.same(found, session.reference(asked))
    return evidence


def boundaries(session: Session, draw: Draw) -> Evidence:
    """Prompts that diverge around block boundaries: a hit is never longer than the common prefix."""
    evidence, worker = Evidence(), session.connected()
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
    return evidence


def position(session: Session, draw: Draw) -> Evidence:
    """Stored blocks at other positions, and after another prefix: no hit."""
    evidence, worker = Evidence(), session.connected()
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
    return evidence


def kind_claim(kind: Kind) -> Callable[[Session, Draw], Evidence]:
    """The claim that a kind of model gives right answers cold, from vLLM's own cache, after a reset and after a restart."""

    def check(session: Session, draw: Draw) -> Evidence:
        evidence, model = Evidence(), session.model(kind.name)
        asked = mixed_prompts(draw.seed, 8)
        given = arguments(kind)
        alone = session.alone(model, **given)
        computed, local = alone.ask_all(asked), alone.ask_all(asked)
        session.end(connected=False)
        worker = session.connected(model, **given)
        cold = worker.ask_all(asked)
        again = session.store(worker, asked)
        forgotten = worker.ask_all(asked)
        fresh = session.restarted(model, **given).ask_all(asked)
        evidence.must_hit(forgotten, "after the reset")
        evidence.must_hit(fresh, "after the restart")
        evidence.same(cold, computed, kind.exact)
        for found in (again, forgotten, fresh):
            evidence.same(found, computed if kind.exact else local, kind.exact)
        counts = [sum(one["cached"] for one in found) for found in (local, again, forgotten, fresh)]
        evidence.notes.append("cached: vLLM alone {:,}; own {:,}, reset {:,}, restart {:,}".format(*counts))
        return evidence

    check.__doc__ = (
        f"{kind.name} ({kind.layers}): computed, from vLLM's own cache, after its reset, and after a restart."
    )
    return check
