"""Hypothesis for all tests: examples from a fixed seed, and no deadlines.

The same commit gives the same examples everywhere, so a red run can be had again; `HYPOTHESIS_PROFILE=explore make test`
draws more and new ones. No test asserts a time, hypothesis' deadlines included: a loaded machine is not a defect.

Tests do not depend on their order: `make test MORE=--shuffle=7` runs the files, and the tests in each, in an order drawn
from 7. `make test-extended MORE=--part=0/2` runs every second test of each file, from the first one on. `make test
MORE=--products=route` runs the tests that a change of `route` may break: its own, and those of the products above it.
"""

import atexit
import gc
import logging
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest
from hypothesis import settings

# The CUDA kernels run in Triton's interpreter. Triton reads this when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests fork processes that use no gRPC: its handlers of a fork would stop threads of the parent, and crash in the child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# HTTP clients of tests trust one authority only: each that is made would read all of them, which takes longer than its
# requests. None at all is an error for some. pip still needs them.
if authorities := os.environ.pop("SSL_CERT_FILE", None):
    os.environ.setdefault("PIP_CERT", authorities)
os.environ.pop("SSL_CERT_DIR", None)
_END = "-----END CERTIFICATE-----\n"
_authority = tempfile.NamedTemporaryFile("w", suffix=".pem")  # noqa: SIM115 - for as long as this process lives
_authority.write(Path(certifi.where()).read_text(encoding="utf-8").partition(_END)[0] + _END)
_authority.flush()
os.environ["SSL_CERT_FILE"] = _authority.name

# Before any test imports them: a failing contract shows its values.
pytest.register_assert_rewrite("foreword.conformance")

# Until all tests are imported there is next to no garbage, and later collections need not walk through the libraries.
gc.disable()

settings.register_profile("foreword", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("explore", deadline=None, max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "foreword"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two processes more than cores: tests also wait, for other processes, and for what takes its time."""
    return len(os.sched_getaffinity(0)) + 2


class _FailedJobs(logging.Handler):
    """A record of failures that `BackgroundJobs` report of jobs for whose result nobody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(f"{record.getMessage()}: {record.exc_info and record.exc_info[1]!r}")


_failed_jobs = _FailedJobs()
logging.getLogger("foreword.store.background_jobs").addHandler(_failed_jobs)


@pytest.fixture(autouse=True)
def no_job_fails() -> Iterator[None]:
    """A job in the background that raises fails the test that runs meanwhile, as an error of another thread does."""
    yield
    found, _failed_jobs.found = _failed_jobs.found, []
    assert not found


def pytest_collection_finish() -> None:
    gc.freeze()
    atexit.register(gc.unfreeze)
    gc.enable()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A failing test is named at once with its error, and not only at the end of the run, which may be cut off."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = f": {crash.path}:{crash.lineno}: {crash.message}" if crash is not None else ""
        print(f"\nFAILED {report.nodeid} ({report.when}){reason}", flush=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in an order drawn from this seed")
    parser.addoption("--products", metavar="NAME,NAME", help="run the tests that a change of these products may break")
    parser.addoption("--part", default="0/1", metavar="K/N", help="run every N-th test of each file, from number K on")


def pytest_report_header(config: pytest.Config) -> str:
    return f"--part={config.getoption('part')} --shuffle={config.getoption('shuffle')}"


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with few tests run first: these are the long ones, and a long one at the end would leave the other cores idle."""
    if chosen := config.getoption("products"):
        import products

        wanted = products.concerned(chosen.split(","))
        items[:] = [item for item in items if item.path.stem in wanted]
    first, every = map(int, config.getoption("part").split("/"))
    count = Counter[Path]()
    mine = []
    for item in items:
        if count[item.path] % every == first:
            mine.append(item)
        count[item.path] += 1
    items[:] = mine
    seed: int | None = config.getoption("shuffle")
    if seed is None:
        tests = Counter(item.path for item in items)
        items.sort(key=lambda item: tests[item.path])
    else:
        draw = random.Random(seed)
        draw.shuffle(items)
        place = {path: draw.random() for path in dict.fromkeys(item.path for item in items)}
        items.sort(key=lambda item: place[item.path])
