"""Claims about two things at once: salts and preemptions, aborts and resets while KV is loaded, updates of weights while
requests run, and resets of models that keep more than full attention.

Requests are added, stepped, aborted and preempted by the claim. Loads of Foreword's connector are held open between their reads
and their writes into KV; those of other connectors end when they end, and then a claim says that nothing was held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, Final

from foreword.referee.models import Kind
from foreword.referee.process import Answer, Prompt, Worker
from foreword.referee.session import BLOCK, LORA, Check, Evidence, RandomPrompts, Session, arguments

_NEW: Final = 24
# Blocks of a KV cache for two long prompts, or for one and two short ones, in steps that end inside a block.
_CACHE: Final[dict[str, Any]] = {
    "max_num_batched_tokens": 200,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 64 * 49_152,
}
_LONG: Final = (930, 850)
_SHORT: Final = (430, 400, 340, 310)  # each answer fills a block
_TINY: Final = (150, 145, 140, 135, 130, 125, 120)
_MANY_NEW: Final = 110
_MOST_STEPS: Final = 400
_HALF: Final = 0.5
_SALTS: Final = ("ann", "bob", None)


class Stage:
    """The requests of a claim in one process, and how far they are.

    Attributes:
        held: whether the connector's loads could be held open.
    """

    def __init__(self, worker: Worker, claim: str) -> None:
        self._worker = worker
        self._claim = claim
        self._count = 0
        self.held = False

    def add(
        self,
        prompts: Sequence[Prompt],
        *,
        salts: Sequence[str | None] = (None,),
        adapters: Sequence[list[Any] | None] = (None,),
        new_tokens: int = _NEW,
    ) -> list[str]:
        """Add requests; salts and adapters are given in turn. Their names."""
        names = [f"{self._claim}-{self._count + number}" for number in range(len(prompts))]
        self._count += len(prompts)
        added = [
            {"name": name, "prompt": prompt, "salt": salt, "adapter": adapter, "new_tokens": new_tokens}
            for name, prompt, salt, adapter in zip(names, prompts, cycle(salts), cycle(adapters), strict=False)
        ]
        self._worker.tell({"add": added})
        return names

    def until(self, most: int = _MOST_STEPS, **counts: int) -> Answer:
        """Step until one of the counts is reached: `computed` tokens, requests that are `loading` or `answered`."""
        return self._worker.tell({"step": most, "until": counts})

    def abort(self, names: Sequence[str]) -> None:
        self._worker.tell({"abort": list(names)})

    def preempt(self) -> None:
        self._worker.tell({"preempt": True})

    def hold(self) -> None:
        self.held = bool(self._worker.tell({"hold": True})["held"])

    def release(self) -> None:
        self._worker.tell({"hold": False})

    def finish(self, names: Sequence[str]) -> list[Answer]:
        """All requests to their ends; the answers of these."""
        found: list[Answer] = self._worker.tell({"finish": list(names)})["results"]
        return found

    def note(self, evidence: Evidence, loading: int) -> None:
        """How many loads were open, and whether they were held."""
        evidence.notes.append(f"{loading:,} loads {'held open' if self.held else 'under way'}")
        if self.held and not loading:
            evidence.missing.append("no load was under way")


def _must_reuse(
    evidence: Evidence, found: Sequence[Answer], when: str, reference: Sequence[Answer], exact: bool = True
) -> None:
    """Hits with the right answers. That nothing hits is a failure: what was stored before had been found."""
    evidence.must_find(found, [one["reusable"] for one in reference], when, _HALF)
    evidence.same(found, reference, exact)


def _settled(worker: Worker, evidence: Evidence) -> None:
    """Background writes end, and vLLM's own cache is reset, at once."""
    worker.settle()
    if not worker.tell({"reset": True, "connector": False})["done"]:
        evidence.problems.append("vLLM cannot reset its cache when no request is left")
        worker.forget()


def salts_preempted(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """Salts and preemptions: prompts under different salts, all preempted in prefill and while they decode."""
    asked = [draw.tokens(f"salts/{number}", length) for number, length in enumerate(_SHORT)]
    reference = session.reference(asked, _NEW)
    turns = [[*prompt, *one["tokens"], 1] for prompt, one in zip(asked, reference, strict=True)]
    next_reference = session.reference(turns)
    worker = session.connected(**_CACHE)
    stage = Stage(worker, "salts-preempted")
    # Each under one salt, so that what is found under another is another's.
    names = stage.add(asked, salts=_SALTS)
    stage.until(computed=300)
    stage.preempt()
    stage.until(answered=1)
    stage.preempt()
    evidence.same(stage.finish(names), reference)
    _settled(worker, evidence)
    found = [worker.ask_all([turn], salt=_SALTS[i % 3])[0] for i, turn in enumerate(turns)]
    _must_reuse(evidence, found, "under their own salts", next_reference)
    evidence.must_find(found, [len(prompt) + _NEW - 2 * BLOCK for prompt in asked], "of prompts and answers", 1.0)
    _settled(worker, evidence)
    for shift in (1, 2):
        found = [worker.ask_all([turn], salt=_SALTS[(i + shift) % 3])[0] for i, turn in enumerate(turns)]
        evidence.must_compute(found, "under other salts, after preemptions", next_reference)
        _settled(worker, evidence)


def salts_aborted(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """Salts and aborts: loads under one salt are aborted, the same prompts asked under another in their place."""
    asked = [draw.tokens(f"salted/{number}", length) for number, length in enumerate((*_SHORT[:3], _SHORT[2]))]
    reference = session.reference(asked, _NEW)
    owners = ("ann", "ann", "ann", "bob")
    worker = session.connected(**_CACHE)
    for prompt, owner in zip(asked, owners, strict=True):
        session.store(worker, [prompt], new_tokens=_NEW, salt=owner)
    stage = Stage(worker, "salts-aborted")
    stage.hold()
    first = stage.add(asked[:2], salts=("ann",))
    loading = stage.until(loading=2, most=50)["loading"]
    stage.abort(first)
    second = stage.add(asked[:2], salts=("bob",))
    third = stage.add(asked[2:], salts=owners[2:])
    stage.until(most=100, loading=2)
    stage.release()
    stage.note(evidence, loading)
    answers = stage.finish([*second, *third])
    evidence.must_compute(answers[:2], "under another salt, after an abort", reference[:2])
    _must_reuse(evidence, answers[2:], "under the salts, at the same time", reference[2:])
    _settled(worker, evidence)
    found = worker.ask_all(asked[:2], _NEW, salt="bob")
    _must_reuse(evidence, found, "under the second salt", reference[:2])
    _settled(worker, evidence)
    found = worker.ask_all(asked[2:3], _NEW, salt="bob")
    evidence.must_compute(found, "under another salt", reference[2:3])
    _settled(worker, evidence)


def adapters_preempted(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """Adapters, salts and preemptions: one prompt under two adapters and a salt, preempted; nothing is found under others."""
    prompts = [draw.tokens(f"adapted/{number}", length) for number, length in enumerate(_SHORT[:2])]
    one, two = (["one", 1, str(session.adapter(1))], ["two", 2, str(session.adapter(2))])
    given = {**_CACHE, **LORA}
    alone = session.alone(**given)
    right = {(i, str(each)): alone.ask([*prompt], _NEW) for i, prompt in enumerate(prompts) for each in (None,)}
    right |= {
        (i, str(each)): alone.ask_all([prompt], _NEW, adapter=each)[0]
        for i, prompt in enumerate(prompts)
        for each in (one, two)
    }
    worker = session.connected(**given)
    stage = Stage(worker, "adapters-preempted")
    names = stage.add(prompts, salts=("ann",), adapters=(one, two))
    stage.until(computed=300)
    stage.preempt()
    stage.until(answered=1)
    stage.preempt()
    evidence.same(stage.finish(names), [right[0, str(one)], right[1, str(two)]])
    _settled(worker, evidence)
    for adapters, salt in (((two, one), "ann"), ((None, None), "ann"), ((one, two), "bob"), ((None, None), None)):
        found = [
            worker.ask_all([prompt], _NEW, adapter=each, salt=salt)[0]
            for prompt, each in zip(prompts, adapters, strict=True)
        ]
        truth = [right[i, str(each)] for i, each in enumerate(adapters)]
        evidence.must_compute(found, f"under another adapter or salt ({salt})", truth)
        _settled(worker, evidence)
    found = [
        worker.ask_all([prompt], _NEW, adapter=each, salt="ann")[0]
        for prompt, each in zip(prompts, (one, two), strict=True)
    ]
    evidence.must_find(found, [len(prompt) - BLOCK for prompt in prompts], "under their own adapters and salt", _HALF)
    evidence.same(found, [right[0, str(one)], right[1, str(two)]])
    _settled(worker, evidence)


def loads_aborted(kind: Kind) -> Check:
    """The claim that requests of a kind of model may be aborted while their KV is loaded, and others get their memory."""

    def check(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
        stored = [draw.tokens(f"long/{number}", length) for number, length in enumerate(_LONG)]
        others = [draw.tokens(f"other/{number}", length) for number, length in enumerate(_LONG)]
        model, given = session.model(kind.name), {**_CACHE, **kind.llm}
        reference = session.reference(others, _NEW, model)
        of_stored = session.reference(stored, _NEW, model)
        worker = session.connected(model, **given)
        session.store(worker, stored, new_tokens=2)
        stage = Stage(worker, "loads-aborted")
        stage.hold()
        loading = stage.add(stored)
        count = stage.until(loading=2, most=50)["loading"]
        stage.abort(loading)
        names = stage.add(others)
        # A block that came back early belongs to one of the others, and is computed, when the load writes into it.
        stage.until(answered=2, most=60)
        stage.release()
        stage.note(evidence, count)
        evidence.same(stage.finish(names), reference, kind.exact)
        _settled(worker, evidence)
        found = worker.ask_all(others, _NEW)
        _must_reuse(evidence, found, "of those that took the memory", reference, kind.exact)
        _settled(worker, evidence)
        found = worker.ask_all(stored, _NEW)
        _must_reuse(evidence, found, "of what was aborted", of_stored, kind.exact)
        _settled(worker, evidence)

    which = "" if kind.name == "Llama" else f" of {kind.name}"
    check.__doc__ = (
        f"Aborts and slow loads{which}: requests are aborted while their KV is loaded, others get their memory."
    )
    return check


def loads_pressed(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """Preemptions and slow loads: requests outgrow memory and are preempted while the KV of another is loaded."""
    stored = [draw.tokens("stored", _SHORT[0])]
    others = [draw.tokens(f"beside/{number}", length) for number, length in enumerate(_TINY)]
    reference = session.reference([*stored, *others], _MANY_NEW)
    worker = session.connected(**_CACHE)
    session.store(worker, stored, new_tokens=2)
    stage = Stage(worker, "loads-pressed")
    stage.hold()
    first = stage.add(stored, new_tokens=_MANY_NEW)
    count = stage.until(loading=1, most=50)["loading"]
    names = stage.add(others, new_tokens=_MANY_NEW)
    before = stage.until(answered=1)["preempted"]
    preempted = stage.until(preempted=before + 1, most=250)["preempted"] - before
    stage.until(most=5)
    stage.release()
    stage.note(evidence, count)
    evidence.notes.append(f"{preempted:,} preempted meanwhile")
    if not preempted:
        evidence.missing.append("nothing was preempted while KV was loaded")
    evidence.same(stage.finish([*first, *names]), reference)
    _settled(worker, evidence)
    _must_reuse(evidence, worker.ask_all([*stored, *others], _MANY_NEW), "on what was stored", reference)
    _settled(worker, evidence)


def shared_aborted(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """Aborts and shared prefixes: of requests that load the same prefix at the same time, the first is aborted."""
    prefix = draw.tokens("prefix", 380)
    asked = [[*prefix, *draw.tokens(f"end/{number}", 40 + 9 * number)] for number in range(3)]
    reference = session.reference(asked, _NEW)
    worker = session.connected(**_CACHE)
    session.store(worker, [prefix], new_tokens=2)
    stage = Stage(worker, "shared-aborted")
    stage.hold()
    names = stage.add(asked)
    count = stage.until(loading=3, most=50)["loading"]
    stage.abort(names[:1])
    again = stage.add(asked[:1])
    stage.until(answered=1, most=20)
    stage.release()
    stage.note(evidence, count)
    _must_reuse(evidence, stage.finish([*again, *names[1:]]), "of a shared prefix", reference)
    _settled(worker, evidence)
    _must_reuse(evidence, worker.ask_all(asked, _NEW), "on what was stored", reference)
    _settled(worker, evidence)


def updated_while(running: bool) -> Check:
    """The claim that weights can change while requests run, which go on and save, or are computed anew (`running`)."""

    def check(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
        asked = [draw.tokens(f"running/{number}", length) for number, length in enumerate(_SHORT)]
        fresh = [draw.tokens(f"fresh/{number}", length) for number, length in enumerate(_SHORT[2:])]
        worker = session.connected(**_CACHE)
        before = session.store(worker, asked)
        stage = Stage(worker, f"updated-{running}")
        names = stage.add([*asked[:2], *fresh])
        stage.until(answered=len(names))  # so that no KV is being loaded
        changed = worker.tell({"exchange": True, "running": running})
        if running and not changed["done"]:
            evidence.problems.append("vLLM could not reset its cache with its requests preempted")
        ended = stage.finish(names)
        _settled(worker, evidence)
        prompts = [*asked[:2], *fresh]
        if running and changed["done"]:
            _check_continued(session, worker, prompts, _by_name(changed["outputs"], names), ended, evidence)
        # A block that was filled behind the change has tokens of the answer, so only the next turn can find it.
        turns = [[*prompt, *one["tokens"], 1] for prompt, one in zip(prompts, ended, strict=True)]
        _check_changed(session, worker, asked, fresh, before, evidence, turns)

    what = "are preempted and computed anew" if running else "go on and save"
    check.__doc__ = f"Updates and running requests: weights change while requests run, which {what}."
    return check


def updated_loading(running: bool) -> Check:
    """The claim that weights can change while KV is loaded: what is found after the reset that succeeds is right. `running`:
    requests that load are preempted; weights then change once more behind their end.
    """

    def check(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
        asked = [draw.tokens(f"loading/{number}", length) for number, length in enumerate(_SHORT)]
        worker = session.connected(**_CACHE)
        before = session.store(worker, asked)
        stage = Stage(worker, f"updated-loading-{running}")
        stage.hold()
        names = stage.add(asked[:2])
        count = stage.until(loading=2, most=50)["loading"]
        done = worker.tell({"exchange": True, "running": running})["done"]
        stage.release()
        stage.note(evidence, count)
        stage.finish(names)
        # vLLM alone refuses to preempt while KV is loaded, before it asks the connector, which then has to be asked again.
        if running and not done and not worker.tell({"reset": True, "connector": True})["done"]:
            evidence.problems.append("a reset is refused when no request is left")
        _settled(worker, evidence)
        if running:
            before = session.store(worker, asked)
            if not worker.tell({"exchange": True})["done"]:
                evidence.problems.append("a second reset is refused when no request is left")
        _check_changed(session, worker, asked, (), before, evidence)

    what = " and its requests are preempted, and again when nothing is left" if running else ""
    check.__doc__ = f"Updates and slow loads: weights change while KV is loaded{what}; what is found later is right."
    return check


def _by_name(outputs: Mapping[str, list[int]], names: Sequence[str]) -> list[list[int]]:
    """The output tokens of requests. vLLM may add something of its own to the names."""
    return [next(tokens for given, tokens in outputs.items() if f"{given}-".startswith(f"{name}-")) for name in names]


def _check_continued(
    session: Session,
    worker: Worker,
    prompts: Sequence[Prompt],
    known: Sequence[Sequence[int]],
    ended: Sequence[Answer],
    evidence: Evidence,
) -> None:
    """Check requests that a change of weights preempted: what they generate is what the new weights generate behind the prompt
    and the tokens that were `known` by then."""
    right = session.computed(worker, [[*prompt, *tokens] for prompt, tokens in zip(prompts, known, strict=True)])
    rests = [
        {**one, "tokens": one["tokens"][len(tokens) :], "logprobs": one["logprobs"][len(tokens) :]}
        for one, tokens in zip(ended, known, strict=True)
    ]
    counts = [min(len(one["tokens"]), len(other["tokens"])) for one, other in zip(rests, right, strict=True)]
    evidence.same(_cut(rests, counts), _cut(right, counts))
    if not any(counts):
        evidence.missing.append("nothing was generated after the change")


def _cut(answers: Sequence[Answer], counts: Sequence[int]) -> list[Answer]:
    """The starts of answers."""
    return [
        {**one, "tokens": one["tokens"][:count], "logprobs": one["logprobs"][:count]}
        for one, count in zip(answers, counts, strict=True)
    ]


def _check_changed(
    session: Session,
    worker: Worker,
    asked: Sequence[Prompt],
    fresh: Sequence[Prompt],
    before: Sequence[Answer],
    evidence: Evidence,
    turns: Sequence[Prompt] = (),
) -> None:
    """Answers after a change of weights are those of the new ones, whatever is found; twice, for what is saved by then.
    `before`: the answers of the old weights to `asked`; `fresh` was asked for the first time while they changed; `turns`
    continue some of them."""
    every = [*asked, *fresh, *turns]
    found = worker.ask_all(every)
    _settled(worker, evidence)
    again = worker.ask_all(every)
    right = [*session.computed(worker, [*asked, *fresh]), *session.computed(worker, turns)]
    session.end(connected=True)
    evidence.same(found, right)
    evidence.must_find(again, [len(prompt) - BLOCK for prompt in every], "after the change", _HALF)
    evidence.same(again, right)
    if not Evidence.differ(before, right[: len(before)]):
        evidence.missing.append("the change changes no answer")


def updated_kind(kind: Kind) -> Check:
    """The claim that a kind of model can be updated as vLLM alone can: its resets succeed when those of vLLM alone do."""

    def check(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
        model, given = session.model(kind.name), arguments(kind)
        asked = sorted(draw.prompts(), key=len)  # the last one leaves the most behind
        ended: dict[bool, Mapping[str, Any]] = {}
        for connected in (False, True):
            worker = session.connected(model, **given) if connected else session.alone(model, **given)
            first = worker.ask_all(asked)
            own = worker.tell({"reset": True, "connector": False})["done"]
            worker.settle()
            again = worker.ask_all(asked)
            changed = worker.tell({"exchange": True})["done"]
            found = worker.ask_all(asked)
            turns = [[*prompt, *one["tokens"], 1] for prompt, one in zip(asked, found, strict=True)]
            later = worker.ask_all(turns)
            ended[connected] = {"resets": (own, changed), "answers": (first, again, found, later)}
            session.end(connected=connected)
        alone, mine = ended[False], ended[True]
        for what, theirs, ours in zip(("reset", "update"), alone["resets"], mine["resets"], strict=True):
            if theirs and not ours:
                evidence.problems.append(f"a {what} is refused that vLLM alone accepts")
        for ours, theirs in zip(mine["answers"], alone["answers"], strict=True):
            evidence.same(ours, theirs, kind.exact)
        once_more = [one["cached"] for one in alone["answers"][3]]  # vLLM's own hits of the next turns
        evidence.must_find(mine["answers"][1], [most // 2 for most in once_more], "after the reset", _HALF)
        evidence.must_miss(mine["answers"][2], "after the change")
        if not Evidence.differ(mine["answers"][0], mine["answers"][2]):
            evidence.missing.append("the change changes no answer")

    check.__doc__ = (
        f"Updates of {kind.name} ({kind.layers}): resets succeed as in vLLM alone, and nothing of before is found."
    )
    return check
