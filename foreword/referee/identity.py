"""Claims about what KV depends on: what differs in one of these must not be given another's KV."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foreword.referee.damage import swap_layers, swap_layers_in_place
from foreword.referee.models import IMAGES, Kind
from foreword.referee.session import LORA, Check, Evidence, RandomPrompts, Session, arguments


def salt(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """`cache_salt`: a prompt stored under one salt is not found under another, nor without one."""
    asked = draw.prompts()
    worker, reference = session.connected(), session.reference(asked)
    session.store(worker, asked, salt="ann")
    for other in ("bob", None):
        found = worker.ask_all(asked, salt=other)
        evidence.must_compute(found, f"under the salt {other}", reference)
        worker.settle()
        worker.forget()
    found = worker.ask_all(asked, salt="ann")
    evidence.must_reuse(found, "under its own salt", reference)


def adapter_claim(kind: Kind) -> Check:
    """The claim that a prompt stored under one adapter of a kind of model is not found under another, nor without one."""

    def check(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
        asked, given = draw.prompts(), arguments(kind, **LORA)
        model = session.model(kind.name)
        one, other = (["one", 1, str(session.adapter(1, model))], ["other", 2, str(session.adapter(2, model))])
        alone = session.alone(model, **given)
        right = {str(each): alone.ask_all(asked, adapter=each) for each in (one, other, None)}
        worker = session.connected(model, **given)
        session.store(worker, asked, adapter=one)
        for each in (other, None):
            found = session.store(worker, asked, adapter=each)
            evidence.must_compute(found, f"under {each[0] if each else 'no'} adapter", right[str(each)])
        found = worker.ask_all(asked, adapter=one)
        evidence.must_hit(found, "under its own adapter")
        evidence.same(found, right[str(one)])

    which = "" if kind.name == "Llama" else f" of {kind.name}"
    check.__doc__ = f"LoRA adapters{which}: a prompt stored under one is not found under another, nor without one."
    return check


def adapter_version(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """A LoRA adapter whose files are replaced under the same name and path, after a restart."""
    asked = draw.prompts()
    used = session.folder / "adapter-used"
    right = session.alone(**LORA).ask_all(asked, adapter=["new", 3, str(session.adapter(2))])
    shutil.copytree(session.adapter(1), used, dirs_exist_ok=True)
    name = ["used", 1, str(used)]
    worker = session.connected(**LORA)
    session.store(worker, asked, adapter=name)
    evidence.must_hit(session.store(worker, asked, adapter=name), "before the change")
    session.end(connected=True)
    shutil.copytree(session.adapter(2), used, dirs_exist_ok=True)
    found = session.connected(**LORA).ask_all(asked, adapter=name)
    evidence.must_compute(found, "after the change", right)


def mixed(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """Requests without an adapter and with two in one step: what is loaded of it later is right."""
    asked = draw.prompts()
    adapters: tuple[list[Any] | None, ...] = (
        None,
        ["one", 1, str(session.adapter(1))],
        ["other", 2, str(session.adapter(2))],
    )
    alone = session.alone(**LORA)
    right = [alone.ask_all(asked, adapter=each) for each in adapters]
    worker = session.connected(**LORA)
    for each in adapters[1:]:  # both are in memory, so that there is one which may be mistaken for none
        worker.ask_all([draw.tokens("first", 40)], adapter=each)
    every = [(prompt, each) for prompt in asked for each in adapters]
    adapter_of = [each for _, each in every]
    together = session.store(worker, [prompt for prompt, _ in every], adapter=adapter_of, how="together")
    # vLLM's kernels for CPUs compute requests without an adapter wrongly in such a step, with and without a connector.
    in_turn = [one for same_prompt in zip(*right, strict=True) for one in same_prompt]
    other = sum(one["tokens"] != truth["tokens"] for one, truth in zip(together, in_turn, strict=True))
    evidence.notes.append(f"{other} of {len(together)} answers of the step itself differ")
    for each, truth in zip(adapters, right, strict=True):
        found = worker.ask_all(asked, adapter=each)
        evidence.same(found, truth)
        if each is not None:
            evidence.must_hit(found, f"of the adapter {each[0]}")


def weights(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """Other weights under the same model path, after a restart."""
    home = session.folder / "replaced"
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(session.model(), home)
    _replaced(session, draw, evidence, home, swap_layers)


def weights_in_place(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """Other weights written into the model's file, whose size, inode and time of modification stay."""
    home = session.folder / "replaced"
    if not home.exists():
        shutil.copytree(session.model(), home)
    _replaced(session, draw, evidence, home, swap_layers_in_place)


def _replaced(
    session: Session, draw: RandomPrompts, evidence: Evidence, home: Path, change: Callable[[Path], None]
) -> None:
    asked = draw.prompts()
    worker = session.connected(home)
    before = session.store(worker, asked)
    evidence.must_hit(session.store(worker, asked), "before the change")
    session.end(connected=True)
    change(home)
    worker = session.connected(home)
    found = session.store(worker, asked)
    right = session.computed(worker, asked, home)
    evidence.must_compute(found, "after the change", right)
    if not Evidence.differ(before, right):
        evidence.missing.append("the change changes no answer")


def updated(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """Weights that are changed in memory, then a reset of vLLM's cache and the connector's: nothing from before is found."""
    asked = draw.prompts()
    worker = session.connected()
    before = session.store(worker, asked)
    evidence.must_hit(session.store(worker, asked), "before the change")
    done = worker.tell({"exchange": True})["done"]
    found = session.store(worker, asked)
    right = session.computed(worker, asked)
    session.end(connected=True)
    if not done:
        evidence.problems.append("vLLM could not reset its cache, as it can without a connector")
        return
    evidence.must_compute(found, "after the change", right)
    if not Evidence.differ(before, right):
        evidence.missing.append("the change changes no answer")


def dtype(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """Prompts stored by a server that computes in float32, asked by one in bfloat16, then by one in float16."""
    asked = draw.prompts()
    session.store(session.connected(), asked)
    for kind in ("bfloat16", "float16"):
        worker = session.connected(dtype=kind)
        found = session.store(worker, asked)
        evidence.must_compute(found, f"of another dtype than {kind}", session.computed(worker, asked, dtype=kind))
        evidence.must_hit(session.store(worker, asked), f"of {kind}")


def images(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """Images: prompts that differ in pixels, or in the place of an image, miss, also if a client names both alike."""
    model, given = session.model(IMAGES.name), arguments(IMAGES)
    one, two, three, four, five, six = random.Random(draw.seed).sample(range(1 << 30), 6)
    asked = [_pictured(one, None, two, None), _pictured(two, None, one, None), _pictured(None, one, None, None)]
    others = [_pictured(three, None, two, None), _pictured(None, two, one, None), _pictured(None, four, None, None)]
    # One identifier for two images. vLLM keeps what it has processed by identifier, so only another process may see both.
    named, misnamed = _pictured(five, None, None, uuid="logo"), _pictured(six, None, None, uuid="logo")
    right = session.reference(
        [*asked, *others, _pictured(five, None, None), _pictured(six, None, None)], model=model, **given
    )
    worker = session.connected(model, **given)
    evidence.same(session.store(worker, [*asked, named]), [*right[:3], right[6]])
    found = session.store(worker, others)
    evidence.must_compute(found, "of other images", right[3:6])
    session.end(connected=True)
    worker = session.connected(model, **given)
    found = worker.ask_all(asked)
    evidence.must_reuse(found, "of the same images", right[:3])
    found = worker.ask_all([misnamed])
    evidence.must_compute(found, "of another image under the same identifier", right[7:])


def _pictured(*parts: int | None, uuid: str = "") -> dict[str, Any]:
    """A prompt with images, by the seeds of their pixels; None is twenty words."""
    words = " ".join(f"t{number}" for number in range(5, 25))
    text = " ".join(words if part is None else "<image> t3" for part in parts)
    images = [part for part in parts if part is not None]
    return {"text": f"t1 t2 {text} {words}", "images": images, "uuids": [uuid] * len(images) if uuid else None}


def block_size(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
    """Prompts stored with blocks of 32 tokens, asked by a server with blocks of 64."""
    asked = draw.prompts()
    reference = session.reference(asked)
    session.store(session.connected(), asked)
    worker = session.connected(block_size=64)
    evidence.same(session.store(worker, asked), reference)
    found = worker.ask_all(asked)
    evidence.must_reuse(found, "with blocks of its own size", reference)
