"""Runs in an environment with vLLM: what a subscriber of vLLM's KV events and a reader of its metrics see, as JSON.

python vllm_events_script.py '{"model": DIR, "store": [URL, ...], "rounds": [[[token, ...], ...], ...], "endpoint": URL,
    "replay": URL}'
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm_case import WITHIN, Engine, finish, make_llm, scheduler_of, worker_of

ZMQ_END = (-1).to_bytes(8, "big", signed=True)


def events(endpoint: str) -> list[dict[str, Any]]:
    """All of the publisher's batches, asked for from its buffer."""
    import msgspec
    import zmq
    from vllm.distributed.kv_events import KVEventBatch

    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = int(WITHIN * 1000)
        socket.connect(endpoint)
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        found: list[dict[str, Any]] = []
        while True:
            number, payload = socket.recv_multipart()[-2:]
            if number == ZMQ_END:
                return found
            batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
            found += [{"kind": type(event).__name__, **msgspec.to_builtins(event)} for event in batch.events]


def mark(engine: Engine, tokens: list[int]) -> None:
    """Write the record of a public prefix, as a server's middleware does, and wait until the connector has read it."""
    from foreword.blocks.public_blocks import public_keys, public_root
    from foreword.blocks.salt import NO_SALT, PUBLIC
    from foreword.prefixes.lease_records import PREFIXES, PrefixRecord
    from foreword.store.shared_records import SharedRecords

    connector = scheduler_of(engine.llm).connector._scheduler
    info = connector._info
    scope = info.scope(NO_SALT)
    keys = public_keys(scope, tokens)
    record = PrefixRecord(
        len(tokens), info.key_size, public_root(scope).hex(), b"".join(keys), name="law", version=1, kind="text",
        content="x", created=0.0, model="tiny", last_key=keys[-1].hex(),
    )  # fmt: skip
    store = worker_of(engine.llm).offload.store
    SharedRecords(store, PREFIXES).put(PREFIXES.key(info.model.hex()[:32], PUBLIC.digest.hex(), "law"), record)
    engine.until(lambda: connector.control.chain(scope, tokens, ()).public == len(keys))


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    from vllm.config import KVEventsConfig

    published = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=job["endpoint"], replay_endpoint=job["replay"]
    )
    job["llm"] = {"disable_log_stats": False, "kv_events_config": published, **job.get("llm", {})}
    engine = Engine(make_llm(job))
    scheduler = scheduler_of(engine.llm)
    if "public" in job:
        mark(engine, job["public"])
    for number, prompts in enumerate(job["rounds"]):
        for i, prompt in enumerate(prompts):
            engine.add(f"{number}-{i}", prompt, **({"cache_salt": job["salts"][number]} if "salts" in job else {}))
            engine.run()
        engine.until(lambda: not scheduler.has_requests())
        engine.settle()
    cache = worker_of(engine.llm).offload
    engine.engine.do_log_stats()
    metrics = {
        f"{one.name}{sorted((k, v) for k, v in one.labels.items() if k in ('tier', 'rank'))}": getattr(
            one, "value", getattr(one, "count", None)
        )
        for one in engine.llm.get_metrics()
        if "foreword" in one.name or "external_prefix_cache" in one.name
    }
    finish(
        {
            "events": events(job["replay"]),
            "metrics": metrics,
            "evictions": {tier.label: tier.store.status().evictions for tier in cache.store.tiers},
            "cached": engine.cached,
        }
    )


if __name__ == "__main__":
    main()
