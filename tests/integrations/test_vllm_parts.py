"""Parts of the vLLM connector that need no vLLM: the versions that fit, the hand-off message, the middleware for named
prefixes, log lines, statistics."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from config_constants import constants
from fake_vllm import FakeVllm, MemoryStorage, served
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm_stub import stubbed_vllm

from foreword.blocks.salt import Salt
from foreword.conformance import FlakyStore, soon
from foreword.errors import ConfigError
from foreword.offload.lookups import StoreLookups
from foreword.offload.policy import LoadCosts
from foreword.router.replica_metrics import parse_metrics
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tier_counters import LookupOutcome
from foreword.store.tiered import TieredStore
from foreword.store_config import EncryptionConfig
from foreword.transfer.errors import TransferRefused

SECRET = "a secret of the right length for tests"


@pytest.fixture(scope="module")
def vllm() -> Iterator[Callable[[str], Any]]:
    """Imports a module of the connector."""
    with stubbed_vllm():
        yield lambda name: importlib.import_module(f"foreword.integrations.{name if '.' in name else f'vllm.{name}'}")


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("0.30.0", False),
        ("0.9.1+cpu", False),
        ("0.31.0", True),
        ("0.33.0+cpu", True),
        ("1.0.0", True),
        ("0.1.dev1", True),
    ],
)
def test_older_vllm(vllm: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, version: str, fits: bool) -> None:
    """An older vLLM is refused in one sentence before anything else is imported from it; a build from sources is not."""
    monkeypatch.setattr(importlib.import_module("vllm"), "__version__", version, raising=False)
    package = importlib.import_module("foreword.integrations.vllm")
    if fits:
        assert package.NamedPrefixes.__module__ == "foreword.integrations.vllm_middleware.middleware"
        return
    for name in package.__all__:
        with pytest.raises(ConfigError) as refused:
            getattr(package, name)
        assert str(refused.value) == f"Foreword's connector needs vLLM 0.31 or later; this is {version}"


def test_newer_vllm(vllm: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that lacks what the connector imports is refused in one sentence, with the versions that were tested."""
    package = importlib.import_module("foreword.integrations.vllm")
    monkeypatch.delitem(sys.modules, "foreword.integrations.vllm.connector", raising=False)
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_events", None)
    with pytest.raises(ConfigError, match=r"does not fit vLLM .*kv_events.*; it was tested with vLLM 0\.31 to 0\.33"):
        _ = package.ForewordConnector
    with pytest.raises(AttributeError, match="ForewordConnectr"):
        _ = package.ForewordConnectr


def test_handoff_message(vllm: Callable[[str], Any]) -> None:
    """A hand-off message is read as it was written. One that was changed, of another block size or layout, or without a
    secret is refused with a reason."""
    terms = vllm("vllm_extras.handoff").HandoffTerms
    mine = terms(32, (b"a" * 16, b"b" * 16), (SECRET,))
    message = mine.write(b"l" * 16, ("host:1", "host:2"), 64, b"k" * 32)
    read = mine.read({"do_remote_prefill": True, "foreword": message})
    assert (read.tokens, read.last) == (64, (b"k" * 32).hex())
    assert terms(32, mine.layouts, ("another " + SECRET, SECRET)).read({"foreword": message}), (
        "secrets are being changed"
    )
    assert read.producer.addresses == ("host:1", "host:2") and read.producer.lease == b"l" * 16
    for reader, params, reason in (
        (mine, {}, "another KV connector"),
        (mine, {"foreword": "nonsense"}, "are not valid"),
        (mine, {"foreword": {**message, "extra": 1}}, "are not valid"),
        (mine, {"foreword": {**message, "addresses": ["evil:1", "evil:2"]}}, "another secret"),
        (mine, {"foreword": {**message, "proof": ""}}, "another secret"),
        (mine, {"foreword": {**message, "proof": "\ud800"}}, "are not valid"),
        (mine, {"foreword": {**message, "addresses": ["\ud800", "host:2"]}}, "are not valid"),
        (terms(32, mine.layouts, ("",)), {"foreword": message}, "another secret"),
        (terms(64, mine.layouts, (SECRET,)), {"foreword": message}, "block size is 32 there and 64 here"),
        (terms(32, mine.layouts[:1], (SECRET,)), {"foreword": message}, "2 ranks there and 1 here"),
        (terms(32, (b"a" * 16, b"c" * 16), (SECRET,)), {"foreword": message}, "another layout"),
    ):
        with pytest.raises(TransferRefused, match=reason):
            reader.read(params)


@pytest.mark.parametrize("field", ["tokens", "ttl", "priority"])
def test_numbers_of_cache_actions(vllm: Callable[[str], Any], field: str) -> None:
    """An action on the cache with a number that is none, or out of all bounds, is skipped; it ends nothing else."""
    retentions = vllm("vllm_extras.retentions")
    wrong = [10**400, -(10**400), float("nan"), float("inf"), True, "1", -1, 0.5 if field == "tokens" else -0.5]
    given = [{"action": "retain", field: one} for one in wrong]
    for one in given:
        assert not retentions.actions_of(SimpleNamespace(kv_transfer_params={retentions.PARAMS_KEY: [one]}))
    [kept] = retentions.actions_of(
        SimpleNamespace(kv_transfer_params={retentions.PARAMS_KEY: [{"action": "retain", field: 32}]})
    )
    assert getattr(kept, field) == 32


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"layout": "neutral"}, '"native" or "portable", not \'neutral\''),
        ({"unit_tokens": 32}, 'unit_tokens in kv_connector_extra_config needs "layout": "portable"'),
        ({"layout": "native", "head_units": 2}, "head_units in kv_connector_extra_config needs"),
        ({"layout": "portable", "unit_tokens": 0}, "a number from 1 on, not 0"),
        ({"layout": "portable", "head_units": "4"}, "a number from 1 on, not '4'"),
        ({"layout": "portable", "head_units": True}, "a number from 1 on, not True"),
        ({"layout": "portable", "transfer": {}}, "leave out layout or transfer"),
        ({"layuot": "portable"}, "Did you mean 'layout'"),
    ],
)
def test_settings_of_the_portable_layout(vllm: Callable[[str], Any], settings: dict[str, Any], reason: str) -> None:
    """Settings of the portable layout that are wrong, or of no use, are errors that say what is wrong."""
    read = vllm("connector_config").ConnectorSettings.read
    with pytest.raises(ConfigError, match=reason):
        read({"store": "memory://", **settings})
    units = read({"store": "memory://", "layout": "portable", "unit_tokens": 32}).units
    assert (units.tokens, units.heads) == (32, 8)
    assert read({"store": "memory://"}).units is None


def test_settings_of_encryption(vllm: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encryption has the names of the configuration file, with the environment's values for what is not given. Master keys in
    the settings, and transfers in the clear, are errors. Tenants have the salts of their generations."""
    read = vllm("connector_config").ConnectorSettings.read
    monkeypatch.setenv("FOREWORD_ENCRYPTION_MASTER_KEYS", f"a:{'5a' * 32}")
    given = {"store": f"disk://{tmp_path}/kv?size=1MiB", "encryption": {"key_store": str(tmp_path / "keys")}}
    with constants(EncryptionConfig, check_seconds=0.01):
        settings = read(given)
    keys = settings.keys()
    assert keys.data is not None and settings.current(Salt(b"", b"client")) == Salt(b"", b"client")
    keys.data.destroy(Salt().prefix)
    later = settings.current(Salt(b"", b"client"))
    assert later.tenant and later.client == b"client" and settings.current(Salt(later.tenant)) == Salt(later.tenant)
    for wrong, reason in (
        ({"master_keys": ["x"]}, "FOREWORD_ENCRYPTION_MASTER_KEYS"),
        ("yes", "is an object"),
        ({"key_stor": "x"}, "Did you mean 'key_store'"),
    ):
        with pytest.raises(ConfigError, match=reason):
            read({**given, "encryption": wrong})
    for clear in ({"transfer": {}}, {"store": "peer://127.0.0.1:9"}):
        with pytest.raises(ConfigError, match="tls"):
            read({**given, **clear})


@pytest.mark.parametrize("tokens", [0, 7])
def test_steps_of_a_degraded_connector(vllm: Callable[[str], Any], tokens: int) -> None:
    """Workers wait for loads in steps without tokens. A degraded connector has no loads, and delays no step."""
    assert vllm("degraded").Expectations().give_up(tokens).tokens == max(tokens, 1)


def test_prefetch(vllm: Callable[[str], Any]) -> None:
    """vLLM gets a request for what the stores have and one more token. Where they have nothing it gets none."""

    async def check(client: httpx.AsyncClient, fake: FakeVllm, storage: MemoryStorage) -> None:
        async def ask(**body: Any) -> tuple[str, int, str | None]:
            found = (await client.post("/v1/cache/prefetch", json=body)).json()
            return found["status"], found["tokens"], found["where"]

        asked = {"max_tokens": 1, "temperature": 0.0, "stream": False}
        assert await ask(prompt="abcd") == ("accepted", 4, "device")
        assert await ask(messages=[{"role": "user", "content": "hi"}]) == ("clipped", 4, "device")
        assert fake.bodies == [{"prompt": [97, 98, 99, 100, 100], **asked}, {"prompt": [*b"<user"], **asked}]
        assert await ask(prompt="abcd", cache_salt="x") == ("refused", 0, None)
        assert await ask(prompt="a") == ("refused", 0, None)
        assert len(fake.bodies) == 2
        assert (await client.post("/v1/cache/prefetch", json={})).status_code == 400
        assert (await client.get("/v1/cache/prefetch")).status_code == 405

    served(vllm, check)


@pytest.mark.parametrize(
    ("body", "header", "params"),
    [
        ({"prompt": "a", "user": "me"}, "", {"foreword_session": {"session_id": "me"}}),
        ({"prompt": "a", "user": "me", "kv_transfer_params": None}, "task", {"foreword_session": {"session_id": "me"}}),
        ({"prompt": "a", "prompt_cache_key": "key", "user": "me"}, "", {"foreword_session": {"session_id": "key"}}),
        ({"metadata": {"user_id": "me"}}, "task", {"foreword_session": {"session_id": "me"}}),
        ({"prompt": "a"}, "task", {"foreword_session": {"session_id": "task"}}),
        ({"user": "me", "kv_transfer_params": {"x": 1}}, "", {"x": 1, "foreword_session": {"session_id": "me"}}),
        ({"user": "me", "kv_transfer_params": {"foreword_session": {}}}, "", {"foreword_session": {}}),
        ({"prompt": "a", "user": "m" * 300}, "", None),
        ({"prompt": "a", "user": 5}, "task", None),
        ({"prompt": "a"}, "", None),
    ],
)
def test_the_session_of_a_request(
    vllm: Callable[[str], Any], body: dict[str, Any], header: str, params: dict[str, Any] | None
) -> None:
    """The session that a request names goes into its `kv_transfer_params`, beside what is there; nothing else changes."""
    data = f" {json.dumps(body)}\n".encode()
    changed = json.loads(vllm("vllm_middleware.middleware").in_session(data, header))
    assert changed == (body if params is None else {**body, "kv_transfer_params": params})


def test_a_connector_that_does_not_answer(vllm: Callable[[str], Any]) -> None:
    """Where the connector is degraded or missing, calls for sessions are a 503 that says so."""

    async def check(client: httpx.AsyncClient, fake: FakeVllm, storage: MemoryStorage) -> None:
        answer = await client.post("/v1/sessions", json={"action": "open", "session_id": "x", "cache_salt": "s"})
        assert answer.status_code == 503 and "connector" in answer.json()["error"]["message"]
        assert fake.bodies[0]["cache_salt"] == "s" and fake.bodies[0]["kv_transfer_params"]["foreword_session"]
        assert (await client.get("/v1/sessions")).status_code == 503

    served(vllm, check)


def test_named_prefixes(vllm: Callable[[str], Any]) -> None:
    """A prefix is tokenized and computed by vLLM, pinned, put before prompts and messages, counted, and unpinned in the end."""

    async def check(client: httpx.AsyncClient, fake: FakeVllm, storage: MemoryStorage) -> None:
        made = await client.post("/v1/prefixes", json={"name": "rules", "content": "be"})
        assert made.status_code == 201 and (made.json()["num_tokens"], made.json()["bytes"]) == (2, 2)
        rules = [ord("b"), ord("e")]
        assert fake.bodies[0]["prompt"] == rules and fake.bodies[0]["max_tokens"] == 1
        assert storage.pinned == [tuple(rules)]
        chat = {"name": "chat", "messages": [{"role": "system", "content": "x"}]}
        made = await client.post("/v1/prefixes", json=chat)
        # The part that does not depend on the message after it.
        assert made.json()["num_tokens"] == len("<system>x<user>") and made.json()["kind"] == "messages"
        fake.bodies.clear()
        await client.post("/v1/completions", json={"prompt": ["a", [7]], "prefix": "rules", "n": 1})
        question = {"role": "user", "content": "?"}
        await client.post("/v1/chat/completions", json={"messages": [question], "prefix": "chat"})
        await client.post("/v1/completions", json={"prompt": "a"})
        assert fake.bodies == [
            {"prompt": [[*rules, ord("a")], [*rules, 7]], "n": 1},
            {"messages": [*chat["messages"], question]},
            {"prompt": "a"},
        ]
        listed = (await client.get("/v1/prefixes")).json()
        assert [(one["name"], one["uses"], one["hit_tokens"]) for one in listed["data"]] == [
            ("chat", 1, 4),
            ("rules", 1, 2),
        ]
        assert listed["budget_bytes"] == 1000
        assert (await client.put("/v1/prefixes/rules", json={"content": "do"})).json()["version"] == 2
        assert (await client.delete("/v1/prefixes/rules")).json()["deleted"] is True
        assert (await client.get("/v1/prefixes/chat")).json()["messages"] == chat["messages"]
        assert len(storage.pinned) == 1

    served(vllm, check)


def test_bad_prefix_requests(vllm: Callable[[str], Any]) -> None:
    """Bad requests get OpenAI's error JSON with a reason, and vLLM does not see them."""

    async def check(client: httpx.AsyncClient, fake: FakeVllm, storage: MemoryStorage) -> None:
        await client.post("/v1/prefixes", json={"name": "rules", "content": "be"})
        fake.bodies.clear()
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
        for method, path, body, status, reason in (
            ("POST", "/v1/prefixes", {"name": "rules", "content": "x"}, 400, "exists"),
            ("POST", "/v1/prefixes", {"name": "a b", "content": "x"}, 400, "letters"),
            ("POST", "/v1/prefixes", {"name": "both", "content": "x", "messages": image}, 400, "either"),
            ("POST", "/v1/prefixes", {"name": "image", "messages": image}, 400, "text"),
            ("GET", "/v1/prefixes/rulez", None, 404, "'rules'"),
            ("PATCH", "/v1/prefixes/rules", None, 405, "PATCH"),
            ("POST", "/v1/completions", {"prompt": "x", "prefix": "rulez"}, 404, "'rules'"),
            ("POST", "/v1/completions", {"prompt": "x", "prefix": 3}, 400, "name"),
            ("POST", "/v1/completions", {"prompt": None, "prefix": "rules"}, 400, "prompt"),
            ("POST", "/v1/chat/completions", {"messages": [], "prefix": "rules"}, 400, "/v1/completions"),
        ):
            answer = await client.request(method, path, json=body)
            assert answer.status_code == status and reason in answer.json()["error"]["message"], answer.text
        assert fake.bodies == []

    served(vllm, check)


def test_weights_version(vllm: Callable[[str], Any]) -> None:
    """A version of the weights is set while vLLM is paused and after it has dropped its KV. A server that was paused before
    stays paused, and one that fails resumes."""

    async def check(client: httpx.AsyncClient, fake: FakeVllm, storage: MemoryStorage) -> None:
        path, version = "/v1/foreword/weights_version", {"version": "run 7, step 1200"}
        assert (await client.get(path)).json() == {"version": "default"}
        assert (await client.post(path, json=version)).json() == version == (await client.get(path)).json()
        steps = [("pause", "keep", True), ("version", version["version"])]
        assert fake.calls == [*steps, ("resume",)]
        fake.calls.clear()
        fake.paused = True
        await client.post(path, json=version)
        assert fake.calls == steps
        for body in ({}, {"version": ""}, {"version": 3}, {"version": "x", "epoch": 1}):
            assert (await client.post(path, json=body)).status_code == 400
        assert (await client.delete(path)).status_code == 405
        for fails, done in (("pause", steps[:1]), ("version", steps)):
            fake.calls.clear()
            fake.paused, fake.fails = False, fails
            assert (await client.post(path, json=version)).status_code == 500
            assert fake.calls == [*done, ("resume",)]

    served(vllm, check)


def test_a_client_that_leaves_during_a_pause(vllm: Callable[[str], Any]) -> None:
    """A version that a client has asked for is set, and vLLM runs again, also if the client goes away while vLLM pauses. A
    second client's version comes after it, and is not taken to be set under an operator's pause."""

    async def main() -> None:
        fake = FakeVllm()
        weights = vllm("vllm_middleware.middleware").WeightsEndpoints(fake)
        fake.gate.clear()
        gone = asyncio.create_task(weights.change("one"))
        await fake.reached.wait()
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        second = asyncio.create_task(weights.change("two"))
        fake.gate.set()
        assert await second == {"version": "two"}
        rounds = [("pause", "keep", True), ("version", "one"), ("resume",)]
        assert fake.calls == [*rounds, rounds[0], ("version", "two"), ("resume",)] and not fake.paused

    asyncio.run(main())


@pytest.fixture
def vllm_log() -> Iterator[list[logging.LogRecord]]:
    """Records that vLLM's handler gets. The loggers are as before in the end."""
    kept: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record)

    theirs, mine = logging.getLogger("vllm"), logging.getLogger("foreword")
    before = mine.handlers[:], mine.level, mine.propagate, theirs.level, theirs.propagate
    handler = Keep()
    theirs.addHandler(handler)
    theirs.setLevel(logging.INFO)
    theirs.propagate = False
    try:
        yield kept
    finally:
        theirs.removeHandler(handler)
        mine.handlers, mine.level, mine.propagate, theirs.level, theirs.propagate = before
        mine.setLevel(before[1])


def test_log_lines_go_through_vllms_logger(vllm_log: list[logging.LogRecord]) -> None:
    """A line that Foreword logs anywhere reaches vLLM's handler once, with its level, its place and a word that says where it
    is from; vLLM's level applies. A logger `foreword` that has handlers keeps them."""
    module = importlib.import_module("foreword.integrations.vllm")
    module.log_through_vllm()
    module.log_through_vllm()
    logging.getLogger("foreword.store").warning("tier %s is full", "disk")
    logging.getLogger("foreword.integrations.vllm.worker_side").info("Foreword %s: ready", "0.2")
    logging.getLogger("foreword.store").debug("not shown")
    assert [(one.name, one.levelname, one.getMessage()) for one in vllm_log] == [
        ("vllm.foreword.store", "WARNING", "Foreword: tier disk is full"),
        ("vllm.foreword.integrations.vllm.worker_side", "INFO", "Foreword 0.2: ready"),
    ]
    assert vllm_log[0].filename == "test_vllm_parts.py"
    logger, own = logging.getLogger("foreword"), logging.NullHandler()
    logger.handlers = [own]
    module.log_through_vllm()
    assert logger.handlers == [own]


@pytest.mark.parametrize(
    ("command", "timeout", "warns"),
    [
        (["vllm", "serve", "MODEL"], 0, True),
        (["/usr/lib/vllm/entrypoints/openai/api_server.py", "--model", "MODEL"], 0, True),
        (["vllm", "serve", "MODEL"], 30, False),
        (["batch.py"], 0, False),
    ],
)
def test_a_stop_that_loses_work(
    vllm: Callable[[str], Any], caplog: pytest.LogCaptureFixture, command: list[str], timeout: int, warns: bool
) -> None:
    """A server that is stopped without time for its write queue gets one warning at its start, and what to do."""
    vllm("connector_config").warn_of_lost_writes(SimpleNamespace(shutdown_timeout=timeout), command)
    assert [one.levelname for one in caplog.records] == ["WARNING"] * warns
    assert all("--shutdown-timeout 30" in one.message for one in caplog.records)


def test_statistics_of_two_processes(vllm: Callable[[str], Any]) -> None:
    """The scheduler's statistics and those of a worker add up: outcomes by tier and by request, and the state of a tier in each
    process. vLLM's log line has the outcomes, and the tiers that are not ok."""
    metrics, outcome = vllm("connector_metrics"), LookupOutcome
    stores = [TieredStore([FlakyStore(MemoryStore(1 << 20, label="disk"))]) for _ in range(2)]
    lookups = [StoreLookups(store, 60.0, 60.0, lambda: 0.0) for store in stores]
    scheduler, worker = (
        metrics.StatsReader(name, store, one, LoadCosts((1,), (1,), list, float))
        for name, store, one in zip(("scheduler", "worker 0"), stores, lookups, strict=True)
    )
    first = scheduler.read([])
    assert first.data["states"] == {"scheduler": {"disk": "ok"}} and scheduler.read([]) is None
    for _ in range(3):
        stores[0].lookup([bytes(64)], deadline=soon())
    lookups[0].refuse(outcome.TOO_SMALL, 7)
    stores[1].tiers[0].suspended = True
    total = worker.read([0.5]).aggregate(scheduler.read([]))
    looked = {"lookups\tdisk\tabsent": 3, "request_lookups\ttoo_small": 1, "request_lookup_tokens\ttoo_small": 7}
    assert looked.items() <= total.data["counts"].items() and not any("found" in one for one in total.data["counts"])
    assert total.data["states"] == {"scheduler": {"disk": "ok"}, "worker 0": {"disk": "suspended"}}
    declared = vllm("connector_counts")
    counts, end = declared.ConnectorCounts(unsafe_requests=2), declared.FoundEnd
    for why, tokens in ((end.LOADED, 96), (end.CUT, 32), (end.LOADED, 32), (end.RESET, 0)):
        counts.note_found(why, tokens)
    total.aggregate(metrics.ForewordStats().count(counts))
    assert metrics.ForewordStats().count(declared.ConnectorCounts()).is_empty()
    line = total.reduce()
    assert (line["lookups too_small"], line["disk in worker 0"], line["mean load ms"]) == (1, "suspended", 500.0)
    assert (line["found tokens loaded"], line["found tokens cut"], line["unsafe_requests"]) == (128, 32, 2)
    assert "found tokens reset" not in line and "found_prefixes\treset" not in total.data["counts"]
    assert json.loads(json.dumps(total.data)) == total.data, "vLLM sends it between processes"
    for one, store in zip(lookups, stores, strict=True):
        one.close()
        store.close()


def test_statistics_that_fail(vllm: Callable[[str], Any], caplog: pytest.LogCaptureFixture) -> None:
    """An error in the statistics, which vLLM asks outside of the connector, does not reach vLLM: they are lost, which is said
    once for each call."""
    metrics = vllm("connector_metrics")
    ours, broken = metrics.ForewordStats(), metrics.ForewordStats({"counts": 7})
    assert ours.aggregate(broken) is ours and ours.aggregate(broken) is ours
    assert broken.reduce() == {} and not broken.is_empty()
    assert ours.reduce()["queued_blocks"] == 0
    assert [one.message.rpartition(".")[2] for one in caplog.records] == ["aggregate", "reduce"]


def test_a_router_reads_the_fingerprint(vllm: Callable[[str], Any]) -> None:
    """The scheduler's report of the weights is in vLLM's metrics as a router reads it, from the first report on; after the
    weights were replaced in place it is the new one. Reports without it change nothing."""
    metrics, registry = vllm("connector_metrics"), CollectorRegistry()
    for name, kind in (("_counter_cls", Counter), ("_gauge_cls", Gauge), ("_histogram_cls", Histogram)):
        setattr(metrics.ForewordPromMetrics, name, staticmethod(partial(kind, registry=registry)))
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
    shown = metrics.ForewordPromMetrics(config, None, ["model_name", "engine"], {0: ["m", "0"]})
    shown.per_engine_labelvalues = {0: ["m", "0"]}

    def read() -> tuple[str | None, bool]:
        found = parse_metrics(generate_latest(registry).decode())
        return found.fingerprint, found.has_connector

    assert read() == (None, True)
    for fingerprint in ("aa", "", "bb", ""):
        scheduler, worker = metrics.ForewordStats(), metrics.ForewordStats()
        scheduler.data["fingerprint"] = fingerprint
        shown.observe(json.loads(json.dumps(worker.aggregate(scheduler).data)), 0)
        assert read() == (fingerprint or read()[0], True)
    assert read()[0] == "bb"


@pytest.mark.parametrize(
    ("variable", "same"),
    [
        ("VLLM_DIST_IDENT", True),
        ("VLLM_INSTANCE_ID", True),
        ("VLLM_HOST_IP", True),
        ("HOSTNAME", True),
        ("VLLM_USE_TRITON_AWQ", False),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", False),
    ],
)
def test_environment_of_servers_that_share_unmeasured(
    vllm: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, variable: str, same: bool
) -> None:
    """Servers with `trust_unmeasured` share KV although variables differ that say where or which a server is, and none where
    those differ that may change numbers."""
    trusted, names = vllm("namespace").trusted, set()
    for value in ("one", "two"):
        monkeypatch.setenv(variable, value)
        names.add(trusted(bytes(32), "settings", SimpleNamespace()))
    assert (len(names) == 1) == same
