"""The router's audit of hits: wrong KV on a replica is found from its answers, and never used again."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import aiohttp
import http_client
import pytest
from router_parts import RouterThread
from shared_server import SharedServers, until

from foreword.api.dialects.answer_reader import UsageCounts
from foreword.api.dialects.decode import Limits
from foreword.api.rights import Tenant
from foreword.blocks.salt import Salt
from foreword.configuration import Config
from foreword.errors import ConfigError
from foreword.process_config import RouterConfig
from foreword.router.auth import RouterAuth
from foreword.router.replica_body import parse_request
from foreword.router.replicas import ReplicaBreaker, ReplicaInfo, ReplicaSpec, Upstream
from foreword.router_extras.replica_audit import ChangedSalts, ReplicaAudit, difference, read_output

KEYS = [
    "--api-keys",
    "alice=alice-key",
    "--api-keys",
    "bob=bob-key",
    "--replica-key",
    "router-key",
    "--tenant-secret",
    "a secret of the tests",
]
PROMPT = " ".join(f"def f{number}(): return {number}" for number in range(20))


def test_wrong_kv_is_found_and_not_used(replica: str, shared: SharedServers, tmp_path: Path) -> None:
    """Right KV is equal. Wrong KV on the replica is found from its answers; then the tenant's requests hit nothing that was
    cached before, other tenants' do, and so it is at a router beside it and at one that starts later."""
    audited = [*KEYS, "--audit-every", "1", "router.audit_budget=1", "--audit-reports", str(tmp_path)]
    pool, layers = shared.open.engine._core.cache.pool, shared.open.engine._parts.runner.layers

    def ask(router: RouterThread, tenant: str = "alice") -> tuple[int, str]:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        with router.http(f"{tenant}-key") as client:
            answer = client.post("/v1/completions", json=body).raise_for_status().json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["text"]

    def audits(router: RouterThread, result: str) -> float:
        return router.metric("foreword:router_audits_total", result=result)

    before = {block for block in range(pool.num_blocks) if pool.key(block) is not None}
    router, second = (RouterThread("--replica", replica, *audited).wait_for(1) for _ in range(2))
    try:
        [(_, right), (cached, again)] = [ask(router) for _ in range(2)]
        assert (cached > 0, again) == (True, right)
        blocks = [block for block in range(pool.num_blocks) if pool.key(block) is not None and block not in before]
        until(lambda: audits(router, "equal") >= 1)
        ask(router, "bob")
        for layer in layers.values():
            layer.v_blocks[blocks] *= -1
        found = [ask(router) for _ in range(8)]  # each adds to the budget, and the audit may run between any two
        until(lambda: audits(router, "different") == 1)
        assert http_client.get(f"{router.url}/health").json() == {"status": "alive", "quarantined": 1}
        found += [ask(router) for _ in range(2)]
        missed = [number for number, (cached, _) in enumerate(found) if not cached]
        assert len(missed) == 1, "the tenant's requests miss once, with their new salt"
        assert [text for _, text in found[missed[0] :]] == [right] * (len(found) - missed[0])
        assert ask(router, "bob")[0] > 0
        until(lambda: second.metric("foreword:router_quarantined_tenants") == 1)
        cached, text = ask(second)
        assert (cached > 0, text) == (True, right)
    finally:
        second.kill()
        router.kill()
    [report] = tmp_path.glob("audit-*.json")
    assert json.loads(report.read_text())["replica"] == replica
    router = RouterThread("--replica", replica, *audited).wait_for(1)
    try:
        cached, text = ask(router)
        assert (cached > 0, text) == (True, right)
    finally:
        router.kill()


def test_salts_of_several_routers(tmp_path: Path) -> None:
    """Salts that one router changes, the others change alike: also if two change the same salt at the same time, or one of them
    cannot write for a while. A router that cannot read a change does not start."""
    folder = tmp_path / "reports"
    first, second = ChangedSalts(folder), ChangedSalts(folder)

    def now(salts: ChangedSalts, tenant: bytes, given: str | None = None) -> str | None:
        return salts.all_of(tenant, given)[-1]

    for salts, tenants in ((first, (b"a", b"b")), (second, (b"b", b"c"))):
        for tenant in tenants:
            salts.change(Salt(tenant))
    folder.write_text("not a folder")
    first.sync()
    assert now(first, b"a") is not None and now(first, b"a", "x") == "x"
    folder.unlink()
    for salts in (first, second, first):
        salts.sync()
    third = ChangedSalts(folder)
    for tenant in (b"a", b"b", b"c"):
        assert now(first, tenant) == now(second, tenant) == now(third, tenant) is not None
    assert len(third) == 3
    third.change(Salt.of(b"a", now(third, b"a")))
    third.change(Salt.of(b"a", "x"))
    third.sync()
    first.sync()
    assert now(first, b"a") == now(third, b"a") != now(second, b"a")
    assert first.all_of(b"a", None)[:2] == [None, now(second, b"a")] and first.all_of(b"a", "x")[0] == "x"
    assert now(first, b"a", "x") == now(third, b"a", "x") not in (None, "x") and now(first, b"b", "x") == "x"
    next(folder.glob("*.salt")).write_text("damaged")
    with pytest.raises(ConfigError, match="changed salts"):
        ChangedSalts(folder)


def test_an_audit_that_fails() -> None:
    """An audit that ends with an unexpected error is counted, and the next hit is audited."""

    async def main() -> None:
        auth = RouterAuth(Config(router=RouterConfig(replica_key="router-key")))
        audit = ReplicaAudit(auth, lambda: True, 1, 1.0, None)
        upstream = Upstream(
            ReplicaSpec("http://127.0.0.1:9"), "flag", ReplicaBreaker(), ReplicaInfo("foreword", ("m",))
        )
        body = json.dumps({"prompt": PROMPT}).encode()
        request = parse_request("completions", body, Limits())
        async with aiohttp.ClientSession() as closed:
            pass
        work = asyncio.create_task(audit.run(closed))
        for failed in (1, 2):
            audit.finished(request, Tenant("alice", b"s"), None, upstream, UsageCounts(cached=8, prompt=9))
            while audit.results["failed"] < failed:
                assert not work.done()
                await asyncio.sleep(0.05)
        work.cancel()

    asyncio.run(main())


def test_difference_of_outputs() -> None:
    """Rounding and ties are small differences; another distribution is a large one. A difference after the outputs have parted
    says nothing."""
    draws = random.Random(1)
    for _ in range(200):
        output = [(str(i), {str(i): -0.1, "x": -2.5, "y": -6.0 - draws.random()}) for i in range(4)]
        rounded = [(t, {n: v + draws.uniform(-0.05, 0.05) for n, v in top.items()}) for t, top in output]
        assert difference(output, rounded) <= 0.1
    tie = [("a", {"a": -0.69, "b": -0.70}), ("c", {"c": -0.1})]
    assert difference(tie, [("b", {"a": -0.70, "b": -0.69}), ("d", {"d": -0.1})]) < 0.1
    assert difference(tie, [("b", {"a": -5.0, "b": -0.01})]) > 0.5
    assert difference(tie, tie[:1]) == float("inf")
    vllm = {
        "choices": [
            {"logprobs": {"content": [{"token": "a", "logprob": -1, "top_logprobs": [{"token": "a", "logprob": -1}]}]}}
        ]
    }
    assert read_output(json.dumps({**vllm, "usage": {"prompt_tokens_details": {"cached_tokens": 3}}}).encode()) == (
        3,
        [("a", {"a": -1.0})],
    )
