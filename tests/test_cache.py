"""`foreword.Cache`: the KV of prefixes, found, loaded, saved, kept and forgotten by tokens, over any stores."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from foreword import Cache
from foreword.errors import BadRequest, ForewordError, StoreError

TOKENS, BYTES = 16, 256
SIZES = {"block_tokens": TOKENS, "block_bytes": BYTES}


def kv(draw: random.Random, count: int) -> list[bytes]:
    """Random KV of some blocks."""
    return [draw.randbytes(BYTES) for _ in range(count)]


@pytest.fixture(params=["memory", "disk", "memory and disk"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ...]:
    memory, disk = "memory://?size=4MiB", f"disk://{tmp_path}/kv?size=16MiB"
    return {"memory": (memory,), "disk": (disk,), "memory and disk": (memory, disk)}[request.param]


@pytest.fixture
def cache(stores: tuple[str, ...]) -> Iterator[Cache]:
    with Cache(*stores, model="one", **SIZES) as opened:
        yield opened


def test_repr_names_the_stores() -> None:
    """A notebook shows of a cache the model, the sizes of a block, the tiers."""
    with Cache("memory://?size=4MiB", model="mine", **SIZES) as cache:
        assert repr(cache) == "Cache('mine', blocks of 16 tokens and 256 bytes; memory)"


def test_random_calls(cache: Cache) -> None:
    """Whatever is saved and forgotten, in whatever order, a load has the bytes that were last known for these tokens, or fewer
    blocks; a find finds as many."""
    draw = random.Random(7)
    trunk = [draw.randrange(1000) for _ in range(6 * TOKENS)]
    prompts = [
        trunk[: draw.randrange(len(trunk))] + [draw.randrange(1000) for _ in range(3 * TOKENS)] for _ in range(8)
    ]
    known: dict[tuple[int, ...], bytes] = {}
    for _ in range(200):
        prompt = draw.choice(prompts)
        full = len(prompt) // TOKENS
        ends = [tuple(prompt[: (number + 1) * TOKENS]) for number in range(full)]
        if draw.random() < 0.2:
            assert cache.forget(prompt).complete
            known = {one: data for one, data in known.items() if one[: full * TOKENS] != ends[-1]}
            left = [one for one in ends[:-1] if one in known]
            while left and not any(one[: len(left[-1])] == left[-1] and one != left[-1] for one in known):
                del known[left.pop()]
        elif draw.random() < 0.5:
            first = next((number for number, end in enumerate(ends) if end not in known), full)
            blocks = kv(draw, full - first)
            assert cache.save(prompt, blocks, first=first)
            known |= dict(zip(ends[first:], blocks, strict=True))
        expected = [known[end] for end in ends if end in known]
        assert cache.find(prompt) == len(expected) * TOKENS
        assert [bytes(block) for block in cache.load(prompt)] == expected


def test_what_separates_blocks(stores: tuple[str, ...], tmp_path: Path) -> None:
    """Another model, tenant, block size or start finds nothing; another process with the same names finds all."""
    disk = f"disk://{tmp_path}/kv?size=16MiB"
    prompt, blocks = list(range(5 * TOKENS + 3)), kv(random.Random(1), 5)
    with Cache(disk, model="one", tenant="ann", **SIZES) as cache:
        assert cache.save(prompt, blocks) and cache.find(prompt) == 5 * TOKENS
        assert cache.find([9, *prompt[1:]]) == 0
    for other in (
        {"model": "two", "tenant": "ann"},
        {"model": "one", "tenant": "bob"},
        {"model": "one"},
        {"model": "one", "tenant": "ann", "block_bytes": 2 * BYTES},
    ):
        with Cache(disk, **{**SIZES, **other}) as cache:  # type: ignore[arg-type]
            assert cache.find(prompt) == 0 and cache.load(prompt) == []
    script = (
        "import sys\nfrom foreword import Cache\n"
        f"with Cache(sys.argv[1], model='one', tenant='ann', block_tokens={TOKENS}, block_bytes={BYTES}) as cache:\n"
        f"    print(b''.join(cache.load(range({len(prompt)}))).hex(), 'torch' in sys.modules, 'aiohttp' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, disk], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [b"".join(blocks).hex(), "False", "False"]


def test_forgetting_one_cache_leaves_others(tmp_path: Path) -> None:
    """All KV of a model and tenant is forgotten, and nothing of others in the same store."""
    disk = f"disk://{tmp_path}/kv?size=16MiB"
    prompt, blocks = list(range(4 * TOKENS)), kv(random.Random(2), 4)
    with (
        Cache(disk, model="one", **SIZES) as one,
        Cache(disk, model="two", **SIZES) as two,
        Cache(disk, model="one", tenant="ann", **SIZES) as ann,
    ):
        for each in (one, two, ann):
            each.save(prompt, blocks)
        receipt = one.forget()
        assert receipt.complete and receipt.blocks == 4
        assert [each.find(prompt) for each in (one, two, ann)] == [0, 4 * TOKENS, 4 * TOKENS]
        assert two.forget([9, *prompt]).complete  # was never saved
        assert two.find(prompt) == 4 * TOKENS


def test_what_is_kept_outlives_traffic(tmp_path: Path) -> None:
    """Blocks that are kept are there after more than the store holds was saved, and are evicted once released."""
    draw = random.Random(3)
    with Cache(f"disk://{tmp_path}/kv?size=1MiB", model="one", **SIZES) as cache:
        prompt = [draw.randrange(1000) for _ in range(8 * TOKENS)]
        cache.save(prompt, kv(draw, 8))
        assert cache.keep(prompt) == 8 * TOKENS

        def traffic() -> None:
            for _ in range(50):
                cache.save([draw.randrange(10**6) for _ in range(64 * TOKENS)], kv(draw, 64))

        traffic()
        assert cache.find(prompt) == 8 * TOKENS
        assert cache.release(prompt) == 8 * TOKENS
        traffic()
        assert cache.find(prompt) == 0


def test_a_damaged_block_ends_a_load(tmp_path: Path) -> None:
    """A block whose file was changed is not loaded, nor what is behind it."""
    prompt, blocks = list(range(6 * TOKENS)), kv(random.Random(4), 6)
    with Cache(f"disk://{tmp_path}/kv?size=16MiB", model="one", **SIZES) as cache:
        cache.save(prompt, blocks)
        files = [path for path in (tmp_path / "kv").rglob("*") if path.is_file() and blocks[3] in path.read_bytes()]
        assert files
        for path in files:
            path.write_bytes(path.read_bytes().replace(blocks[3], bytes(BYTES)))
        assert [bytes(block) for block in cache.load(prompt)] == blocks[:3]


def test_arrays_are_blocks(cache: Cache) -> None:
    """Anything with a contiguous buffer is a block: bytes, arrays, rows of an array."""
    array = np.random.default_rng(0).standard_normal((3, BYTES // 4)).astype(np.float32)
    prompt = list(range(3 * TOKENS))
    assert cache.save(prompt, list(array))
    assert np.array_equal(np.stack([np.frombuffer(block, np.float32) for block in cache.load(prompt)]), array)


@pytest.mark.parametrize(
    ("blocks", "first", "message"),
    [
        ([bytes(BYTES)] * 3, 0, "40 tokens fill 2 blocks of 16; got blocks 0 to 2"),
        ([bytes(BYTES)], 2, "got blocks 2 to 2"),
        ([bytes(BYTES)], -1, "got blocks -1 to -1"),
        ([bytes(BYTES), bytes(BYTES - 1)], 0, "block 1 has 255 bytes, not 256"),
    ],
    ids=["too many", "too late", "negative", "size"],
)
def test_wrong_blocks(cache: Cache, blocks: list[bytes], first: int, message: str) -> None:
    """Blocks that do not fit their tokens are refused, and nothing of another size is stored."""
    with pytest.raises(BadRequest, match=message):
        cache.save(list(range(40)), blocks, first=first)


def test_wrong_arguments(tmp_path: Path, cache: Cache) -> None:
    """Sizes, names and URLs that make no sense are refused, each with an error of Foreword."""
    memory = "memory://?size=1MiB"
    for given, error in (
        ({"block_tokens": 0}, BadRequest),
        ({"block_bytes": -1}, BadRequest),
        ({"model": ""}, BadRequest),
    ):
        with pytest.raises(error):
            Cache(memory, **{"model": "one", **SIZES, **given})  # type: ignore[arg-type]
    for urls in ((), ("nothing://here",), ("disk://relative?sise=1GiB",)):
        with pytest.raises(StoreError) as raised:
            Cache(*urls, model="one", **SIZES)
        assert isinstance(raised.value, ForewordError)
    with pytest.raises(BadRequest, match="no block"):
        cache.forget([1, 2, 3])
