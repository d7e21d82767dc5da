"""`foreword.Cache`: the KV of prefixes, found, loaded, saved, kept and forgotten by tokens, over any stores."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

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


def of_eight(dtype: str) -> np.ndarray[Any, Any]:
    return np.arange(BYTES // np.dtype(dtype).itemsize).astype(dtype)


@pytest.mark.parametrize("dtype", [">f4", "<f2", "f8", "i8", "?", "S4", "V8", "c8", "f4,i4"])
def test_arrays_of_any_items_are_blocks(cache: Cache, dtype: str) -> None:
    """A block comes back byte for byte, whatever its items are: of another byte order, of two fields, of half precision."""
    array = of_eight(dtype) if dtype != "f4,i4" else np.ones(BYTES // 8, dtype)
    assert cache.save(range(TOKENS), [array])
    assert [bytes(block) for block in cache.load(range(TOKENS))] == [array.tobytes()]


@pytest.mark.parametrize(
    "block",
    [
        np.array([[1], "x"] * (BYTES // 16), object), of_eight("u1").reshape(16, 16).T, np.zeros(2 * BYTES, np.uint8)[::2],
        of_eight("u1")[::-1], of_eight("M8[s]"), None, "x" * BYTES, [0] * BYTES,
    ],
    ids=["objects", "transposed", "every second", "backwards", "times", "None", "text", "list"],
)  # fmt: skip
def test_what_has_no_contiguous_bytes_is_no_block(cache: Cache, block: Any) -> None:
    """An array of Python objects, whose buffer has addresses, and what has no contiguous buffer, are refused with what to give
    instead; nothing is stored of them, and what was stored stays."""
    cache.save(range(TOKENS), [bytes(BYTES)])
    with pytest.raises(
        BadRequest, match=r"block 0, a .* has no contiguous bytes: .* Give bytes or an array in C order"
    ):
        cache.save(range(TOKENS), [block])
    assert [bytes(one) for one in cache.load(range(TOKENS))] == [bytes(BYTES)]


def test_a_closed_cache_says_so(cache: Cache) -> None:
    """A call of a closed cache is an error, not a miss: `save` would say that all is stored. What was loaded stays."""
    cache.save(range(TOKENS), [bytes(BYTES)])
    [loaded] = cache.load(range(TOKENS))
    cache.close()
    cache.close()
    for call in (cache.find, cache.load, cache.keep, cache.release, cache.forget, lambda it: cache.save(it, [])):
        with pytest.raises(BadRequest, match="closed"):
            call(range(TOKENS))
    with pytest.raises(BadRequest, match="closed"):
        cache.forget()
    with pytest.raises(BadRequest, match="closed"), cache:
        pass
    assert bytes(loaded) == bytes(BYTES)


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
        ({"block_tokens": 16.0}, BadRequest),
        ({"block_tokens": 2**32}, BadRequest),
        ({"block_bytes": "256"}, BadRequest),
        ({"model": b"one"}, BadRequest),
        ({"model": "\ud800"}, BadRequest),
        ({"tenant": None}, BadRequest),
        ({"timeout": None}, BadRequest),
        ({"timeout": float("nan")}, BadRequest),
        ({"timeout": 0}, BadRequest),
        ({"timeout": True}, BadRequest),
        ({"timeout": "5"}, BadRequest),
    ):
        with pytest.raises(error):
            Cache(memory, **{"model": "one", **SIZES, **given})  # type: ignore[arg-type]
    for urls in ((), ("nothing://here",), ("disk://relative?sise=1GiB",)):
        with pytest.raises(StoreError) as raised:
            Cache(*urls, model="one", **SIZES)
        assert isinstance(raised.value, ForewordError)
    for url in ([memory], tmp_path, b"memory://", None):
        with pytest.raises(BadRequest, match="each a text"):
            Cache(url, model="one", **SIZES)  # type: ignore[arg-type]
    for tokens in ([1, 2, 3], np.arange(3), np.arange(0)):
        with pytest.raises(BadRequest, match="no block"):
            cache.forget(tokens)  # type: ignore[arg-type]
    for unordered in (set(range(TOKENS)), dict.fromkeys(range(TOKENS))):
        with pytest.raises(BadRequest, match="order"):
            cache.find(unordered)  # type: ignore[arg-type]


def test_sizes_of_numpy(tmp_path: Path) -> None:
    """Sizes that numpy has computed are the same sizes: what is saved with them is found with plain ones."""
    store = f"disk://{tmp_path}/kv?size=1MiB"
    with Cache(store, model="one", block_tokens=np.int64(TOKENS), block_bytes=np.prod([BYTES // 4, 4])) as cache:  # type: ignore[arg-type]
        cache.save(range(TOKENS), [bytes(BYTES)])
    with Cache(store, model="one", timeout=np.float32(5), **SIZES) as cache:  # type: ignore[arg-type]
        assert cache.find(range(TOKENS)) == TOKENS


def test_arrays_of_named_fields() -> None:
    """An array whose fields have names is bytes, whatever the names; one that has Python objects in a field is refused."""
    with Cache("memory://?size=1MiB", model="one", **SIZES) as cache:
        block = np.zeros(BYTES // 4, [("O", "<f2"), ("V", "<f2")])
        assert cache.save(range(TOKENS), [block])
        with pytest.raises(BadRequest, match="Python objects"):
            cache.save(range(TOKENS), [np.zeros(BYTES // 8, [("V", "O")])])


class _Closing(list[bytes]):
    """Blocks that close the cache once they are taken."""

    cache: Cache

    def __getitem__(self, index: Any) -> Any:
        self.cache.close()
        return super().__getitem__(index)


def test_a_cache_that_is_closed_during_a_save() -> None:
    """A save during which another thread closes the cache does not say that all was saved."""
    blocks = _Closing([bytes(BYTES)])
    blocks.cache = Cache("memory://?size=1MiB", model="one", **SIZES)
    with pytest.raises(BadRequest, match="closed"):
        blocks.cache.save(range(TOKENS), blocks)


@pytest.mark.parametrize(
    "name", ["a b", "100%", "a%2525b", "ä", "[1]", "a:b@c", "a%3Fb%23c", "b\udcff", "b%FF", "a%0Ab", "~"]
)
def test_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    """A folder may have any name that the system gives one, also bytes that are no text: another opening finds what was saved,
    and the folder is the one that was named."""
    url = f"disk://{tmp_path}/{name}?size=1MiB"
    with Cache(url, model="one", **SIZES) as cache:
        cache.save(range(TOKENS), [bytes(BYTES)])
    with Cache(url, model="one", **SIZES) as cache:
        assert cache.find(range(TOKENS)) == TOKENS
    assert os.listdir(tmp_path) == [unquote(name, errors="surrogateescape")]


@pytest.mark.parametrize("name", ["a\tb", "a\nb", "a\rb", "a%00b", "a\ud800"])
def test_characters_that_no_folder_has(tmp_path: Path, name: str) -> None:
    """Characters that a parser of URLs would leave out, and those that no system takes in a name, are refused, and no other
    folder is made."""
    with pytest.raises(StoreError, match="no URL has; %09 is a tab"):
        Cache(f"disk://{tmp_path}/{name}", model="one", **SIZES)
    assert not os.listdir(tmp_path)
