"""Checks claims, one after the other: progress, results in a file, a reproducer for each failure, the table."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from foreword.compiled_code import processor_field
from foreword.errors import ConfigError, did_you_mean
from foreword.referee import crossed, faults, identity, reuse, schedules
from foreword.referee.models import KINDS, Kind, kind_named
from foreword.referee.process import Failed, Refused
from foreword.referee.session import Check, Evidence, RandomPrompts, Session, Target, environment_note
from foreword.referee.settings import PAIRS, pair_claim

STANDARD_MODELS: Final = ("Gemma 3", "gpt-oss", "Granite 4")
# Kinds whose weights change in memory: the first in the standard set.
_UPDATED: Final = ("Gemma 3", "Granite 4", "Llama 4", "Mistral", "DeepSeek V2", "Llama")
_CLAIMS: Final[dict[str, Check]] = {
    "reuse.cold": reuse.cold,
    "reuse.own": reuse.own,
    "reuse.reset": reuse.reset,
    "reuse.boundaries": reuse.boundaries,
    "reuse.position": reuse.position,
    "reuse.turns": reuse.turns,
    "identity.salt": identity.salt,
    "reuse.restart": reuse.restart,
    "fault.flipped": faults.flipped,
    "fault.truncated": faults.truncated,
    "fault.emptied": faults.emptied,
    "fault.swapped": faults.swapped,
    "fault.killed": faults.killed,
    "fault.full-disk": faults.full_disk,
    **{f"identity.settings.{pair.name}": pair_claim(pair) for pair in PAIRS},
    "identity.dtype": identity.dtype,
    "identity.block-size": identity.block_size,
    "identity.weights": identity.weights,
    "identity.weights-in-place": identity.weights_in_place,
    "identity.updated": identity.updated,
    "identity.adapter": identity.adapter_claim(KINDS["Llama"]),
    "identity.mixed": identity.mixed,
    "identity.adapter-version": identity.adapter_version,
    "identity.adapter-windows": identity.adapter_claim(KINDS["Gemma 3"]),
    "identity.images": identity.images,
    "reuse.long": reuse.long,
    "schedule.chunked": schedules.chunked,
    "schedule.together": schedules.together,
    "schedule.aborted": schedules.aborted,
    "schedule.preempted": schedules.preempted,
    "schedule.pressed": schedules.pressed,
    "schedule.many": schedules.many,
    "schedule.drafted": schedules.drafted,
    "crossed.salts-preempted": crossed.salts_preempted,
    "crossed.salts-aborted": crossed.salts_aborted,
    "crossed.loads-aborted": crossed.loads_aborted(KINDS["Llama"]),
    "crossed.loads-pressed": crossed.loads_pressed,
    "crossed.shared-aborted": crossed.shared_aborted,
    "crossed.updated-running": crossed.updated_while(running=False),
    "crossed.updated-preempted": crossed.updated_while(running=True),
    "crossed.updated-loading": crossed.updated_loading(running=False),
    "crossed.updated-refused": crossed.updated_loading(running=True),
    "crossed.adapters-preempted": crossed.adapters_preempted,
    "crossed.loads-aborted-windows": crossed.loads_aborted(KINDS["Gemma 3"]),
    **{f"crossed.updated.{name}": crossed.updated_kind(KINDS[name]) for name in _UPDATED},
    **{f"pooling.{kind.lower()}": reuse.pooling_claim(kind) for kind in ("LAST", "MEAN", "CLS")},
}
# Claims that are checked only with `Plan.long`, or if they are named.
_LONG: Final = frozenset(
    (
        "identity.adapter-windows",
        *(f"identity.settings.{pair.name}" for pair in PAIRS if not pair.standard),
        *(f"crossed.updated.{name}" for name in _UPDATED[1:]),
    )
)
# Claims that the embedded engine's worker can be asked for.
_ENGINE_CLAIMS: Final = tuple(name for name in _CLAIMS if name.startswith(("reuse.", "fault.", "identity.salt")))


@dataclass(frozen=True)
class Result:
    """A claim's outcome.

    Attributes:
        result: "pass", "FAIL", or "not shown" if a positive control did not succeed.
        figure: what was counted.
        cpu_seconds: of vLLM's processes, without the imports that they share.
        reproducer: the script that shows a failure again.
    """

    claim: str
    text: str
    result: str
    figure: str
    seconds: float
    reproducer: str = ""
    cpu_seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """The claims and settings of a run.

    Attributes:
        only: names of claims, or starts of them; all if empty.
        models: kinds of models besides the Llama.
        long: whether to check the claims too that are not in the standard set.
        failures: where reproducers are written.
        report: JSON file that is written after each claim; its results are kept if `resume` is set.
    """

    target: Target
    seed: int
    only: tuple[str, ...] = ()
    models: tuple[str, ...] = STANDARD_MODELS
    failures: Path = Path("conform-failures")
    report: Path | None = None
    resume: bool = False
    long: bool = False

    def claims(self) -> dict[str, Check]:
        """The claims by name. Raises ConfigError for an unknown name."""
        known = {name: _CLAIMS[name] for name in (_ENGINE_CLAIMS if self.target.engine else _CLAIMS)}
        if not self.target.engine:
            known |= {f"model.{kind.name}": reuse.kind_claim(kind) for kind in map(_kind, self.models)}
        for text in self.only:
            if not any(name.startswith(text) for name in known):
                raise ConfigError(f"there is no claim {text!r}{did_you_mean(text, known)}")
        chosen = (name for name in known if self.long or name not in _LONG or name in self.only)
        return {name: known[name] for name in chosen if not self.only or name.startswith(self.only)}

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that results must have in common to be in one report. Where the files are does not matter."""
        target, files = json.dumps(self.target.transfer), self.target.files
        target = target.replace(json.dumps(str(files))[1:-1], "") if files is not None else target
        return {"target": json.loads(target), "engine": self.target.engine, "seed": self.seed}


def _kind(text: str) -> Kind:
    kind = kind_named(text)
    if kind is None:
        raise ConfigError(f"there is no kind of model {text!r}{did_you_mean(text, KINDS)}")
    return kind


def conform(plan: Plan, say: Callable[[str], None]) -> list[Result]:
    """Check all claims; `say` gets each result. Raises ConfigError, Failed."""
    claims, found = plan.claims(), _earlier(plan)
    _check_folder(plan, found)
    versions = environment_note(plan.target.python)
    with _session(plan.target) as session:
        for number, (name, check) in enumerate(claims.items(), 1):
            if name in found:
                continue
            say(f"[{number}/{len(claims)}] {name}: {_first_line(check)}")
            result = _check(session, plan, name, check, versions)
            say(
                f"    {result.result} ({result.seconds:.1f} s, {result.cpu_seconds:.1f} s of processor time): {result.figure}"
            )
            found[name] = result
            _write(plan, versions, list(found.values()))
    return [found[name] for name in claims]


@contextmanager
def _session(target: Target) -> Iterator[Session]:
    folder = Path(tempfile.mkdtemp(prefix="foreword-conform-"))
    session = Session(target, folder)
    try:
        yield session
    finally:
        session.close()
        shutil.rmtree(folder, ignore_errors=True)


def _check_folder(plan: Plan, found: dict[str, Result]) -> None:
    """The files of the target are damaged: they must not hold anything else."""
    files = plan.target.files
    if files is not None and files.is_dir() and any(files.iterdir()) and not found:
        raise ConfigError(f"{files} is not empty, and files in it would be damaged; name a new folder with --folder")


def _check(session: Session, plan: Plan, name: str, check: Check, versions: str) -> Result:
    began, cpu = time.monotonic(), session.cpu_seconds
    draw = RandomPrompts(f"{plan.seed}/{name}")
    evidence, transcript = attempt(session, check, draw)
    path = ""
    if evidence.result == "FAIL":
        if evidence.failing and evidence.failing[0] < len(draw.lengths):
            small = RandomPrompts(f"{draw.seed}/small", (draw.lengths[evidence.failing[0]],))
            less, shorter = attempt(session, check, small)
            if less.result == "FAIL":
                draw, transcript = small, shorter
        path = str(_write_reproducer(plan, name, draw, evidence, transcript, versions))
    seconds = round(time.monotonic() - began, 1)
    used = round(session.cpu_seconds - cpu, 1)
    return Result(name, _first_line(check), evidence.result, evidence.figure, seconds, path, used)


def attempt(session: Session, check: Check, draw: RandomPrompts) -> tuple[Evidence, list[str]]:
    """Check a claim; returns the evidence and what was said to the processes with the connector. A process that fails is a
    failure of the claim; the next claim gets a new process. Settings that the target refuses show nothing."""
    session.begin()
    evidence = Evidence()
    try:
        check(session, draw, evidence)
    except Refused as error:
        evidence = Evidence(missing=[error.message])
    except Failed as error:
        evidence = Evidence(problems=[error.message])
        session.stop()
    return evidence, list(session.transcript)


def _first_line(check: Check) -> str:
    return (check.__doc__ or "").partition("\n")[0].rstrip(".")


def _write_reproducer(
    plan: Plan, name: str, draw: RandomPrompts, evidence: Evidence, transcript: Sequence[str], versions: str
) -> Path:
    """A script with the seed, the prompts and all that was said to vLLM."""
    plan.failures.mkdir(parents=True, exist_ok=True)
    path = plan.failures / f"{name.replace(' ', '-')}.py"
    said = "\n".join(f"# {line}" for line in transcript)
    target = {**asdict(plan.target), "files": str(plan.target.files) if plan.target.files else None}
    path.write_text(
        f'"""{name}: {evidence.figure}.\n\nFound with {versions}. Run it with an interpreter that has `foreword[conform]`;'
        f' empty the connector\'s store before.\n"""\n\n'
        f"from foreword.referee.check_claims import reproduce\n\n"
        f"TARGET = {target!r}\n\n"
        f'if __name__ == "__main__":\n'
        f"    reproduce(TARGET, {name!r}, seed={draw.seed!r}, lengths={draw.lengths!r})\n\n"
        f"# What the processes with the connector were sent, and what they answered, when it was found:\n{said}\n",
        encoding="utf-8",
    )
    return path


def reproduce(target: dict[str, Any], name: str, *, seed: str, lengths: tuple[int, ...]) -> None:
    """Check a claim again with the prompts of a reproducer, print what was sent and answered, and exit with 1 if it fails."""
    files = target["files"]
    given = Target(**{**target, "files": Path(files) if files else None})
    kinds = (name.removeprefix("model."),) if name.startswith("model.") else ()
    check = Plan(given, 0, models=kinds).claims()[name]
    with _session(given) as session:
        evidence, transcript = attempt(session, check, RandomPrompts(seed, lengths))
    print("\n".join(transcript))
    print(f"\n{name}: {evidence.result}: {evidence.figure}")
    raise SystemExit(evidence.result == "FAIL")


def _earlier(plan: Plan) -> dict[str, Result]:
    """Results of an interrupted run. Raises ConfigError if they are of something else."""
    if not plan.resume or plan.report is None or not plan.report.exists():
        return {}
    try:
        stored = json.loads(plan.report.read_text(encoding="utf-8"))
        if stored["plan"] != plan.identity:
            raise ConfigError(f"{plan.report} is a report on another target or seed")
        return {one["claim"]: Result(**one) for one in stored["claims"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot resume {plan.report}: {error}") from error


def _write(plan: Plan, versions: str, results: Sequence[Result]) -> None:
    if plan.report is not None:
        report = {
            "plan": plan.identity,
            "name": plan.target.name,
            "versions": versions,
            "processor": processor_field("model name"),
            "date": time.strftime("%Y-%m-%d"),
            "claims": [asdict(one) for one in results],
        }
        plan.report.parent.mkdir(parents=True, exist_ok=True)
        plan.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def table(results: Sequence[Result]) -> str:
    """The results as Markdown."""
    rows = [("claim", "what", "result", "figure")]
    rows += [(one.claim, one.text, one.result, one.figure.replace("|", "/")) for one in results]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---|---|---|---|", *lines[1:]])
