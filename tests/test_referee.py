"""`foreword conform`: how evidence is judged, damage to files, resuming, reproducers, and with a real vLLM what it finds."""

from __future__ import annotations

import ast
import json
import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from foreword.errors import ConfigError
from foreword.referee import check_claims
from foreword.referee.check_claims import Plan, Result, conform
from foreword.referee.damage import (
    cut_files,
    data_files,
    empty_files,
    flip_bytes,
    swap_files,
    swap_layers_in_place,
)
from foreword.referee.matrix import BEGIN, END, Environment, conform_matrix, environments, write_page
from foreword.referee.models import KINDS
from foreword.referee.process import Failed, Forks
from foreword.referee.reuse import common
from foreword.referee.session import Evidence, RandomPrompts, Session, Target
from foreword.referee.settings import PAIRS, pair_claim

VLLM = os.environ.get("FOREWORD_VLLM_PYTHON", "")
CHECKOUT = Path(__file__).parent.parent


def answer(cached: int = 0, tokens: tuple[int, ...] = (1, 2), logprob: float = -1.0, own: int = 64) -> dict[str, Any]:
    return {"cached": cached, "tokens": list(tokens), "logprobs": [logprob] * len(tokens), "reusable": own}


@pytest.mark.parametrize(
    ("found", "result"),
    [
        (answer(64), "pass"),
        (answer(32), "pass"),
        (answer(31), "FAIL"),
        (answer(0), "not shown"),
        (answer(64, (1, 3)), "FAIL"),
        (answer(64, logprob=-1.1), "FAIL"),
        (answer(0, (1, 3)), "FAIL"),
    ],
)
def test_positive_control(found: dict[str, Any], result: str) -> None:
    """Other tokens or log-probabilities fail a claim, and so do fewer hits than half of vLLM's own; right answers without a hit
    show nothing."""
    evidence = Evidence()
    evidence.must_hit([found], "here", [answer()])
    evidence.same([found], [answer()])
    assert evidence.result == result


def test_figures_of_wrong_answers() -> None:
    """A failure says how far the wrong answers are apart, up to the first other token; not how equal the right ones are."""
    evidence = Evidence()
    evidence.same([answer(logprob=-1.0)] * 2, [answer(logprob=-1.0), answer(tokens=(1, 3), logprob=-3.5)])
    assert evidence.figure.startswith("1 of 2 answers wrong, with log-probabilities up to 2 apart")
    evidence = Evidence()
    evidence.same([answer(logprob=-1.0)], [answer(logprob=-1.0001)])
    assert evidence.figure.startswith("0 of 1 answers wrong, with log-probabilities at most 1e-04 apart")


def test_negative_control() -> None:
    """A hit that must not be, or one that is longer than the common prefix, fails a claim though the answer is right."""
    for check in (lambda one: one.must_miss([answer(32)], "x"), lambda one: one.at_most([answer(33)], [32])):
        evidence = Evidence()
        check(evidence)
        assert evidence.result == "FAIL" and evidence.failing == [0]
    assert common([1, 2, 3], [[1, 2, 4], [1]]) == 2 and common([1], []) == 0


def test_damage(tmp_path: Path) -> None:
    """Each damage changes every data file, and no index."""
    draw = random.Random(1)

    def fill() -> dict[str, bytes]:
        for name in ("a/one.bin", "a/two.bin", "b/three.bin", "index.sqlite"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(draw.randbytes(20_000))
        return contents()

    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    for damage, count in ((cut_files, 3), (empty_files, 3), (flip_bytes, 30)):
        before = fill()
        assert damage(tmp_path) >= count
        after = contents()
        assert [name for name in before if after[name] == before[name]] == ["index.sqlite"]
    for path in data_files(tmp_path) or [tmp_path / "a" / "one.bin"]:
        path.unlink()
    before = fill()
    (tmp_path / "b" / "three.bin").rename(tmp_path / "b" / "one.bin")
    assert swap_files(tmp_path) == 2
    assert (tmp_path / "a" / "one.bin").read_bytes() == before["three.bin"]


def test_other_weights_in_place(tmp_path: Path) -> None:
    """The exchange of two layers leaves size, inode and time of modification, and is undone by another one."""
    model = KINDS["Llama"].build(tmp_path / "model")
    [path] = model.glob("*.safetensors")
    before, status = path.read_bytes(), path.stat()
    swap_layers_in_place(model)
    after = path.stat()
    assert path.read_bytes() != before
    assert all(getattr(after, name) == getattr(status, name) for name in ("st_size", "st_ino", "st_mtime_ns"))
    swap_layers_in_place(model)
    tensors = load(path.read_bytes())
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load(before).items())


def test_the_pairs_of_settings() -> None:
    """Each pair is a claim with a name of its own, of a known kind of model; the pairs cover at least eight kinds."""
    assert len(PAIRS) >= 30 and len({pair.name for pair in PAIRS}) == len(PAIRS)
    assert len({pair.kind for pair in PAIRS}) >= 8 and all(pair.kind in KINDS for pair in PAIRS)
    assert {pair.changes for pair in PAIRS} == {pair.changes for pair in PAIRS if pair.standard} == {True, False}
    claims = Plan(Target({}, sys.executable, None), 1, ("identity.settings",), long=True).claims()
    assert list(claims) == [f"identity.settings.{pair.name}" for pair in PAIRS]
    assert all(len(pair_claim(pair).__doc__ or "") < 400 for pair in PAIRS)


def test_the_standard_set() -> None:
    """Claims of the long set are checked with `long`, or if they are named."""
    target, [rare] = (
        Target({}, sys.executable, None),
        [f"identity.settings.{p.name}" for p in PAIRS if not p.standard][:1],
    )
    assert rare in Plan(target, 1, long=True).claims() and rare not in Plan(target, 1).claims()
    assert rare not in Plan(target, 1, ("identity",)).claims() and list(Plan(target, 1, (rare,)).claims()) == [rare]


BROKEN = {"connectors": 32, "crossed_connectors": 20}


@pytest.mark.parametrize(("module", "least"), BROKEN.items(), ids=BROKEN)
def test_every_broken_connector_has_a_claim(module: str, least: int) -> None:
    """Each broken connector says what is broken and names a claim that exists."""
    tree = ast.parse((CHECKOUT / "tests" / "mutants" / f"{module}.py").read_text(encoding="utf-8"))
    claims = Plan(Target({}, sys.executable, None), 1, models=tuple(KINDS), long=True).claims()
    named = {
        one.name: ast.literal_eval(item.value)
        for one in tree.body
        if isinstance(one, ast.ClassDef) and ast.get_docstring(one)
        for item in one.body
        if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == "claim"
    }
    assert len(named) >= least and set(named.values()) <= set(claims)


def set_attributes(path: Path) -> set[str]:
    """The names of the attributes that the classes of a module set on themselves."""
    stored = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Attribute)]
    return {one.attr for one in stored if isinstance(one.ctx, ast.Store) and ast.unparse(one.value) == "self"}


@pytest.mark.parametrize("module", BROKEN)
def test_broken_connectors_break_nothing_else(module: str) -> None:
    """Blocks that broken connectors keep have other names than those that Foreword's keeps."""
    broken = set_attributes(CHECKOUT / "tests" / "mutants" / f"{module}.py")
    whole = set_attributes(Path(check_claims.__file__).parents[1] / "integrations" / "vllm" / "connector.py")
    assert broken and whole and not broken & whole


def test_reports_reproducers_and_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is tried again with its one prompt and leaves a script; an interrupted run continues with the next claim;
    a report on another seed is refused."""
    drawn: list[RandomPrompts] = []

    def fails(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
        """Always fails."""
        drawn.append(draw)
        evidence.answers, evidence.wrong = 4, 1
        evidence.failing = [2] if len(draw.lengths) > 1 else [0]

    def passes(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
        """Always passes."""
        evidence.answers = 1

    monkeypatch.setattr(check_claims, "_CLAIMS", {"one.fails": fails, "two.passes": passes})
    report, said = tmp_path / "report.json", list[str]()
    target = Target({"kv_connector": "X"}, sys.executable, None)
    plan = Plan(target, 1, ("one",), (), tmp_path / "failures", report)
    [first] = conform(plan, said.append)
    assert first.result == "FAIL" and [len(one.lengths) for one in drawn] == [4, 1]
    script = Path(first.reproducer).read_text(encoding="utf-8")
    assert "one.fails" in script and repr(drawn[1].seed) in script and "lengths=(600,)" in script
    compile(script, first.reproducer, "exec")

    both = Plan(target, 1, (), (), tmp_path / "failures", report, resume=True)
    found = conform(both, said.append)
    assert [one.result for one in found] == ["FAIL", "pass"] and len(drawn) == 2
    assert [Result(**one) for one in json.loads(report.read_text())["claims"]] == found
    with pytest.raises(ConfigError, match="another target or seed"):
        conform(Plan(target, 2, (), (), tmp_path, report, resume=True), said.append)
    with pytest.raises(ConfigError, match=r"one\.fails"):
        conform(Plan(target, 1, ("one.fail-",), ()), said.append)


def interpreter(folder: Path, name: str, versions: str) -> Path:
    """An interpreter that can say which versions it has, and nothing else."""
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{versions}'\n")
    path.chmod(0o755)
    return path


def test_a_matrix_of_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each environment runs all claims over files of its own; an interrupted run continues with what is missing, over other
    files. The page gets a column for each, between its marks and nowhere else."""
    ran: list[tuple[str, Path | None]] = []

    def works(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
        """Works."""
        ran.append((session.target.python, session.target.files))
        evidence.answers = 4
        evidence.wrong = 1 if session.target.python.endswith("new") else 0

    monkeypatch.setattr(check_claims, "_CLAIMS", {"one.works": works})
    old = interpreter(tmp_path, "old", "vllm 0.50.0+cpu, torch 3.0")
    new = interpreter(tmp_path, "new", "vllm 0.51.0, torch 3.0")
    given = environments([str(old), f"nightly={new}"])
    assert [one.name for one in given] == ["vLLM 0.50.0", "nightly"]

    def check(folder: Path, resume: bool, only: tuple[str, ...] = ()) -> dict[str, list[Result]]:
        def own(one: Environment) -> dict[str, Any]:
            files = folder / one.name
            return {"files": files, "transfer": {"kv_connector": "X", "store": f"disk://{files}"}}

        target = Target({"kv_connector": "X"}, "", None)
        plan = Plan(target, 1, only, (), tmp_path / "failures", tmp_path / "report.json", resume)
        found = conform_matrix(plan, given, own, lambda text: None)
        write_page(page, plan, given, found)
        return found

    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    found = check(tmp_path / "a", resume=False)
    assert [one.result for some in found.values() for one in some] == ["pass", "FAIL"]
    (tmp_path / "report-nightly.json").unlink()
    check(tmp_path / "b", resume=True)
    assert [where for _, where in ran] == [tmp_path / one for one in ("a/vLLM 0.50.0", "a/nightly", "b/nightly")]
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n") and text.endswith(f"{END}\nafter\n") and "old\n" not in text
    assert "| claim | what | vLLM 0.50.0 | nightly |" in text
    assert "| `one.works` | Works | pass, 0 of 4 wrong | **FAIL**, 1 of 4 wrong |" in text
    assert "- nightly: vllm 0.51.0, torch 3.0" in text
    monkeypatch.setattr(check_claims, "_CLAIMS", {"one.works": works, "two.works": works})
    for _ in range(2):
        check(tmp_path / "a", resume=True, only=("two",))
    both = page.read_text()
    assert "| `one.works` | Works | pass, 0 of 4 wrong | **FAIL**, 1 of 4 wrong |" in both
    assert "| `two.works` | Works | pass, 0 of 4 wrong | **FAIL**, 1 of 4 wrong |" in both
    assert both.count("seed 1") == 2 and both.count("\nClaims `two`:\n") == 1 and both.count("| claim | what |") == 1
    page.write_text("no marks")
    with pytest.raises(ConfigError, match="must have the lines"):
        check(tmp_path / "c", resume=True)


def test_environments_of_a_matrix(tmp_path: Path) -> None:
    """A fault of an environment is said before anything runs."""
    plain = interpreter(tmp_path, "plain", "torch 3.0")
    twin = interpreter(tmp_path, "twin", "vllm 0.50.0")
    for given, why in (
        ([str(plain)], "has no vLLM"),
        ([str(twin), str(twin)], "NAME=PYTHON"),
        ([f"x={tmp_path}/no"], "cannot run"),
    ):
        with pytest.raises(ConfigError, match=why):
            environments(given)


def test_files_of_others_are_not_damaged(tmp_path: Path) -> None:
    """A folder that holds something is refused before anything starts."""
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(ConfigError, match="not empty"):
        conform(Plan(Target({"kv_connector": "X"}, sys.executable, tmp_path), 1, ("reuse.cold",)), lambda text: None)


def foreword(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), **variables}
    command = [sys.executable, "-m", "foreword", "conform", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=580, check=False)


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGTERM], ids=lambda one: one.name)
def test_nothing_outlives_a_killed_driver(tmp_path: Path, signal_: signal.Signals) -> None:
    """The process that has started a script is killed, or its whole group gets a signal to end, as by Ctrl-C or `timeout`: the
    script ends, and what it has started."""
    (tmp_path / "script.py").write_text(
        "import subprocess, sys\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print(other.pid, flush=True)\n"
        "other.wait()\n"
    )
    (tmp_path / "driver.py").write_text(
        "import os, sys\n"
        "from foreword.referee.process import Forks\n"
        "forks = Forks(sys.executable, os.environ, ())\n"
        "script = forks.start(['script.py'], stderr=sys.stderr)\n"
        "print(script.pid, script.stdout.readline(), flush=True)\n"
        "script.wait()\n"
    )
    command = [sys.executable, "driver.py"]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as driver:
        assert driver.stdout is not None
        started = [os.pidfd_open(int(number)) for number in driver.stdout.readline().split()]
        assert len(started) == 2
        if signal_ is signal.SIGKILL:
            driver.kill()
        else:
            os.killpg(driver.pid, signal_)
    for process in started:
        assert select.select([process], [], [], 60)[0]
        os.close(process)


def test_imports_that_end_the_process(tmp_path: Path) -> None:
    """Where the process that forks ends while it imports, the error says how, and the next script gets another process."""
    module = tmp_path / "imported.py"
    module.write_text("import os\nos._exit(3)\n")
    (tmp_path / "script.py").write_text("print('started')\n")
    forks = Forks(sys.executable, {**os.environ, "PYTHONPATH": str(tmp_path)}, ("imported",))
    script = [str(tmp_path / "script.py")]
    with pytest.raises(Failed, match="did not start: the process that forks ended with status 3"):
        forks.start(script, stderr=sys.__stderr__)
    module.write_text("")
    started = forks.start(script, stderr=sys.__stderr__)
    assert started.stdout is not None and started.stdout.readline() == "started\n" and started.wait(60) == 0
    started.stdout.close()
    forks.close()


@pytest.mark.parametrize(
    ("python", "problem"),
    [("/no/such", "cannot run /no/such"), (sys.executable, "has no module a_connector.of_another: install it there")],
)
def test_an_interpreter_that_cannot_run_the_connector(python: str, problem: str, tmp_path: Path) -> None:
    """A wrong `--python` is a usage error, not a failed claim, nor claims that are not shown one after the other."""
    (tmp_path / "vllm.py").touch()
    transfer = {"kv_connector": "X", "kv_connector_module_path": "a_connector.of_another", "kv_role": "kv_both"}
    given = ("--python", python, "--only", "reuse.cold", "--kv-transfer-config", json.dumps(transfer))
    done = foreword(*given, PYTHONPATH=f"{CHECKOUT}:{tmp_path}")
    assert done.returncode == 2 and problem in done.stderr, done.stderr


def test_a_signal_while_a_small_disk_is_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small disk that is mounted when a signal ends the command is unmounted, also before `mount` has said that it is."""
    log, programs = tmp_path / "log", tmp_path / "bin"
    programs.mkdir()
    for name, then in (("mount", "kill -USR1 $PPID; read never"), ("umount", "exit 1")):
        (programs / name).write_text(f"#!/bin/sh\necho {name} >> {log}\n{then}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    def end(number: int, frame: Any) -> None:
        raise SystemExit(number)

    before = signal.signal(signal.SIGUSR1, end)
    session = Session(Target({"kv_connector": "X"}, sys.executable, tmp_path / "kv"), tmp_path)
    try:
        with pytest.raises(SystemExit), session.small_disk(1 << 20):
            pass
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert log.read_text().split() == ["mount", "umount"]


@pytest.mark.slow
def test_a_store(tmp_path: Path) -> None:
    """`--store` runs the contract on an empty part of a store and removes what it wrote."""
    done = foreword("--store", f"disk://{tmp_path}/kv?size=1GiB")
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-2000:]
    assert not any((tmp_path / "kv").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_embedded_engine() -> None:
    """The embedded engine keeps its promises about restarts and flipped bytes."""
    done = foreword("--engine", "--only", "reuse.restart", "--only", "fault.flipped")
    assert done.returncode == 0 and "2 claims: 2 pass" in done.stdout, done.stdout + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.skipif(not VLLM, reason="FOREWORD_VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.timeout(600)
def test_broken_connectors_are_caught() -> None:
    """Connectors that save too early, too late and in the wrong order fail their claims, and Foreword's passes these."""
    command = [sys.executable, str(CHECKOUT / "tests" / "mutants" / "run.py"), "--only", "Saves"]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=580, check=False)
    assert done.returncode == 0 and "3 of 3 caught" in done.stdout, done.stdout + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.skipif(not VLLM, reason="FOREWORD_VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.timeout(600)
def test_defects_that_need_two_things_are_caught() -> None:
    """Connectors that are wrong only where an abort, a preemption or a reset meets something else fail crossed claims."""
    names = ("SaltLostAfterPreemption", "AbortFreesEarly", "ResetForgetsRunning")
    only = [word for name in names for word in ("--only", name)]
    command = [sys.executable, str(CHECKOUT / "tests" / "mutants" / "run.py"), *only]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=580, check=False)
    assert done.returncode == 0 and "3 of 3 caught" in done.stdout, done.stdout + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.skipif(not VLLM, reason="FOREWORD_VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.timeout(600)
def test_a_connector_without_salt(tmp_path: Path) -> None:
    """vLLM's ExampleConnector, whose names have no salt: its hits are right, and the claim about salts fails with a script."""
    kv = tmp_path / "kv"
    extra = {"shared_storage_path": str(kv)}
    transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    given = ("--kv-transfer-config", json.dumps(transfer), "--folder", str(kv), "--python", VLLM)
    only = ("--only", "reuse.reset", "--only", "identity.salt", "--reproducers", str(tmp_path / "failures"))
    done = foreword(*given, *only)
    assert done.returncode == 1 and "2 claims: 1 pass, 1 FAIL" in done.stdout, done.stdout + done.stderr[-2000:]
    assert "hit under the salt bob" in (tmp_path / "failures" / "identity.salt.py").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(not VLLM, reason="FOREWORD_VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.timeout(600)
def test_what_a_worker_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM with the connector tells its counters and what the store has. A line that it does not know ends it."""
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    kv = tmp_path / "kv"
    extra = {"store": [f"disk://{kv}?size=64MiB"], "lookup_timeout": 60}
    module = {"kv_connector": "ForewordConnector", "kv_connector_module_path": "foreword.integrations.vllm"}
    transfer = {**module, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    session = Session(Target(transfer, VLLM, kv), tmp_path)
    try:
        worker = session.connected()
        asked = RandomPrompts("worker", (100,)).prompts()
        session.store(worker, asked)
        assert [one["cached"] for one in worker.ask_all(asked)] == [96]
        found = [(name, labels) for name, labels, value in worker.metrics("vllm:foreword_") if value]
        assert any(name == "vllm:foreword_request_lookups" and labels["outcome"] == "found" for name, labels in found)
        assert worker.stored()["bytes"] > 0
        with pytest.raises(Failed, match="unknown line"):
            worker.tell({"counters": True})
    finally:
        session.close()
