"""Publications of vLLM about the connector: KV events, metrics and a log line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_process import BLOCK, attempt, make_model, needs_vllm, prompts, result

from foreword.blocks.keys import Scope, chain_keys
from foreword.blocks.salt import Salt
from foreword.routing.directory import CacheTier, Directory
from foreword.routing.event_feed import KvEventFeed
from foreword.store.frame import HEADER_BYTES

pytestmark = needs_vllm

# Five prompts of nine blocks, into smaller tiers: both evict the end of the first.
ASKED = prompts(21, [300] * 5)
BLOCKS = 9 * len(ASKED)
FRAME = 49152 + HEADER_BYTES
ROOM = {"near": 31, "disk": 40}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Five prompts, of which memory holds three and a half and disk four and a half; then the second one again."""
    folder = tmp_path_factory.mktemp("events")
    done = attempt(
        "vllm_events_script.py",
        {
            "model": str(make_model(folder / "model")),
            "store": [
                f"memory://?size={ROOM['near'] * FRAME}&label=near",
                f"disk://{folder}/kv?size={ROOM['disk'] * FRAME}",
            ],
            "rounds": [ASKED, ASKED[1:2]],
            "endpoint": f"ipc://{folder}/events",
            "replay": f"ipc://{folder}/replay",
        },
        forked=False,
        VLLM_LOGGING_LEVEL="INFO",
    )
    return {**result(done), "lines": [line for line in done.stderr.splitlines() if "KV Transfer metrics" in line]}


def of_device(event: dict[str, Any]) -> bool:
    return event.get("ownership") is None


def stored(events: list[dict[str, Any]], owner: str | None) -> dict[int, tuple[int | None, list[int]]]:
    """Block hash -> parent and tokens, of all stored blocks of one owner."""
    blocks: dict[int, tuple[int | None, list[int]]] = {}
    for event in events:
        if event["kind"] == "BlockStored" and event.get("ownership") == owner:
            parent = event["parent_block_hash"]
            for i, name in enumerate(event["block_hashes"]):
                blocks[name] = (parent, event["token_ids"][i * BLOCK : (i + 1) * BLOCK])
                parent = name
    return blocks


def test_tier_events_join_device_events(found: dict[str, Any]) -> None:
    """The events of each tier have the hashes, parents and tokens of the device's events."""
    device = stored(found["events"], None)
    assert len(device) == BLOCKS
    assert stored(found["events"], "near") == device and stored(found["events"], "disk") == device
    tokens = sorted(part for _, part in device.values())
    assert tokens == sorted(prompt[i * BLOCK : (i + 1) * BLOCK] for prompt in ASKED for i in range(9))


def test_events_name_the_tier(found: dict[str, Any]) -> None:
    """Memory and disk differ in medium and owner; both are local."""
    media = {(one["ownership"], one["medium"], one["locality"]) for one in found["events"] if not of_device(one)}
    assert media == {("near", "CPU", "LOCAL"), ("disk", "STORAGE", "LOCAL")}


@pytest.mark.parametrize("tier", ["near", "disk"])
def test_events_track_a_tier(tier: str, found: dict[str, Any]) -> None:
    """A subscriber that applies all events knows exactly which blocks a tier has."""
    held: set[int] = set()
    removed = 0
    for event in found["events"]:
        if event.get("ownership") != tier:
            continue
        if event["kind"] == "BlockStored":
            held.update(event["block_hashes"])
        else:
            assert set(event["block_hashes"]) <= held
            held -= set(event["block_hashes"])
            removed += len(event["block_hashes"])
    assert removed == found["evictions"][tier] > 0 and len(held) == ROOM[tier]


def test_metrics(found: dict[str, Any]) -> None:
    """vLLM's /metrics count blocks, bytes and loads by tier."""
    metrics = found["metrics"]

    def of(name: str, tier: str = "") -> float:
        labels = [("tier", tier)] if tier else []
        value: float = metrics[f"vllm:foreword_{name}{labels}"]
        return value

    assert of("saved_blocks", "disk") >= BLOCKS and of("saved_bytes", "disk") == of("saved_blocks", "disk") * FRAME
    assert of("saved_blocks", "near") >= BLOCKS
    assert of("loaded_blocks", "near") + of("loaded_blocks", "disk") == found["cached"]["1-0"] // BLOCK > 0
    assert of("loaded_bytes", "disk") == of("loaded_blocks", "disk") * FRAME > 0
    assert of("loads") == of("load_seconds") == 1
    assert of("dropped_blocks") == of("loads_cut") == 0
    assert metrics["vllm:foreword_queued_blocks[('rank', '0')]"] == 0


def test_public_blocks(tmp_path: Path) -> None:
    """A router that has read the events knows that the tiers have the public blocks of a text for every tenant, and what a
    tenant has behind them for that one."""
    text, own = prompts(22, [4 * BLOCK + 5])[0], prompts(23, [3 * BLOCK])[0]
    tenants = [Salt(name) for name in (b"ann", b"bob", b"cyd")]
    done = attempt(
        "vllm_events_script.py",
        {
            "model": str(make_model(tmp_path / "model")),
            "store": [f"disk://{tmp_path}/kv?size=64MiB"],
            "public": text,
            "rounds": [[text + own], [text + own]],
            "salts": [salt.text for salt in tenants[:2]],
            "endpoint": f"ipc://{tmp_path}/events",
            "replay": f"ipc://{tmp_path}/replay",
        },
        forked=False,
    )
    found = result(done)
    assert found["cached"] == {"0-0": 0, "1-0": 4 * BLOCK}
    directory = Directory(10_000)
    feed = KvEventFeed(directory, "r", b"m", BLOCK)
    events = [{**event, "type": event["kind"]} for event in found["events"] if event["kind"] != "AllBlocksCleared"]
    feed.receive(0, events)
    assert feed.counters.malformed == 0 and len(directory.public.keys) == 4
    for number, salt in enumerate(tenants):
        scope, prompt = Scope(b"m", BLOCK, salt), text + own
        shared = directory.lookup(directory.public.keys_of(scope, prompt)).of("r")
        assert shared[CacheTier.DISK] == 4 and shared[CacheTier.DEVICE] == 0
        device = directory.lookup(chain_keys(scope.root(), prompt, BLOCK)).of("r")
        assert device[CacheTier.DEVICE] == (7 if number < 2 else 0)


def test_log_line(found: dict[str, Any]) -> None:
    """vLLM's log line has the traffic of each tier."""
    [*_, line] = found["lines"]
    assert "disk saved blocks=" in line and "near loaded blocks=" in line and "queued_blocks=0" in line
