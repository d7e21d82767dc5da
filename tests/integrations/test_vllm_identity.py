"""Dependencies of a request's KV under vLLM: tenant, adapter, media, prompt embeddings and the version of the weights."""

from __future__ import annotations

import json
import shutil
from collections import UserDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from vllm_process import PYTHON, answers, disk, make_model, prompts, run

from foreword.blocks.keys import Scope, TokenChain
from foreword.blocks.salt import Salt
from foreword.integrations.vllm.request_identity import Adapter, RequestIdentities, RequestIdentity, salt_of
from foreword.integrations.vllm.weights import WeightsVersion
from foreword.integrations.vllm_extras.adapters import AdapterFiles, AdaptersInMemory
from foreword.integrations.vllm_extras.media import InputContents
from foreword.referee.models import make_adapter

BLOCK = 4


class Item(UserDict[str, Any]):
    """Processed media, with the method of vLLM's `MultiModalKwargsItem`."""

    def get_data(self) -> dict[str, Any]:
        return dict(self)


@dataclass(frozen=True)
class Image:
    offset: int
    length: int
    pixels: int = 1
    identifier: str = "a"

    def feature(self) -> SimpleNamespace:
        place = SimpleNamespace(offset=self.offset, length=self.length, is_embed=None)
        data = Item(pixel_values=torch.full((2, 2), self.pixels, dtype=torch.float32), grid=torch.tensor([1, 2]))
        return SimpleNamespace(
            modality="image", identifier=self.identifier, mm_hash=self.identifier, mm_position=place, data=data
        )


def request(images: Sequence[Image] = (), **given: Any) -> SimpleNamespace:
    known = {"lora_request": None, "prompt_embeds": None, "cache_salt": None, "num_prompt_tokens": 32}
    return SimpleNamespace(mm_features=[image.feature() for image in images], **{**known, **given})


def identities(settings: bytes = b"", **given: Any) -> RequestIdentities:
    return RequestIdentities(settings=settings, adapters=AdapterFiles(), inputs=InputContents(BLOCK, settings), **given)


def identity(asked: Any) -> RequestIdentity:
    found = identities().of(asked)
    assert found is not None
    return found


def keys(tokens: Sequence[int], asked: Any, version: bytes = b"") -> list[bytes]:
    root = Scope(b"model", BLOCK, salt_of(asked)).root()
    chain = TokenChain(root, BLOCK, tokens, identity(asked).extras(version))
    return chain.keys_to(len(tokens) // BLOCK)


def write_adapter(folder: Path, value: float, **config: Any) -> None:
    folder.mkdir(exist_ok=True)
    save_file({"lora_A.weight": torch.full((2, 2), float(value))}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 2, **config}))


def lora(number: int, path: Path, **given: Any) -> SimpleNamespace:
    return SimpleNamespace(lora_int_id=number, lora_path=str(path), **given)


# In one request an identifier has one content; in another request it may have another.
images = st.builds(
    lambda pixels, places: [Image(offset, length, pixels[name], name) for offset, length, name in places],
    st.fixed_dictionaries({"a": st.integers(1, 2), "b": st.integers(1, 2)}),
    st.lists(st.tuples(st.integers(0, 14), st.integers(1, 9), st.sampled_from("ab")), max_size=3),
)
described = st.tuples(
    st.lists(st.integers(0, 1), min_size=16, max_size=16),
    images,
    st.sampled_from(
        [None, "x", "x\x00", "foreword:", Salt(b"x").text, Salt.of(b"x", "x").text, Salt.of(b"x", "y").text]
    ),
    st.sampled_from([None, "x", "y"]),
    st.sampled_from([b"", b"x", b"y"]),
)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "x", 1)
    write_adapter(folder / "y", 2)
    return folder


@settings(max_examples=examples(500))
@given(one=described, other=described)
def test_keys_are_equal_exactly_where_the_input_is(adapters: Path, one: Any, other: Any) -> None:
    """Two requests share a block's key exactly if tenant, adapter, weights version, and all tokens and images up to its end are
    equal."""

    def seen(given: Any, end: int) -> Any:
        tokens, found, *rest = given
        overlapping = [(i.offset, i.length, i.pixels, i.identifier) for i in found if i.offset < end]
        return tokens[:end], sorted(overlapping), rest

    def keys_of(given: Any) -> list[bytes]:
        adapter = lora(1, adapters / given[3]) if given[3] else None
        return keys(given[0], request(given[1], cache_salt=given[2], lora_request=adapter), given[4])

    for block, (mine, others) in enumerate(zip(keys_of(one), keys_of(other), strict=True)):
        end = (block + 1) * BLOCK
        assert (mine == others) == (seen(one, end) == seen(other, end))


def test_text_keeps_its_keys() -> None:
    """Requests with text alone have the keys of chains without extras, so that named prefixes find them. The tenant is what
    the router has written; a salt of the client's own makes none."""
    tokens = list(range(12))
    assert keys(tokens, request()) == TokenChain(Scope(b"model", BLOCK).root(), BLOCK, tokens).keys_to(3)
    for sent in ("ann", "b" * 64, "foreword:ann", "foreword:", "/616e6e"):
        assert salt_of(request(cache_salt=sent)) == Salt.of(b"", sent)
    for salt in (Salt(b"ann"), Salt.of(b"ann", "session"), Salt.of(b"", "session")):
        assert salt_of(request(cache_salt=salt.text)) == salt


def test_the_place_of_an_image() -> None:
    """An image elsewhere in a block, or in another block, gives other keys from its block on, with the same tokens."""
    tokens = [7] * 12
    keys_of = {place: keys(tokens, request([Image(place, 2)])) for place in (4, 5, 6, 8)}
    assert len({found[0] for found in keys_of.values()}) == 1
    assert all(len({found[block] for found in keys_of.values()}) == 4 for block in (1, 2))


def test_an_identifier_for_two_images() -> None:
    """An identifier that a client gives to two images is not identified from then on; others still are."""
    one = identities()
    assert one.of(request([Image(0, 4)])) is not None
    assert one.of(request([Image(0, 4, pixels=2)])) is None
    assert one.of(request([Image(0, 4)])) is None
    assert one.of(request([Image(0, 4, identifier="b")])) is not None


@pytest.mark.parametrize(
    "data",
    [
        None,
        Item(image_grid_thw=torch.tensor([1, 2, 2])),
        Item(address=7, monotonic_id=1, signature=[1, 2]),
        Item(pixel_values=torch.ones(2), unknown=object()),
    ],
)
def test_media_without_content(data: Any) -> None:
    """Media whose content is elsewhere (in another process, with another instance) or of an unknown kind is not identified."""
    asked = request([Image(0, 4)])
    asked.mm_features[0].data = data
    assert identities().of(asked) is None


def test_unknown_keys_of_vllm() -> None:
    """A request for which vLLM's own block hashes have a part that is unknown here is not identified."""
    asked = request([Image(0, 4), Image(9, 4)], cache_salt="x")
    known = identities(extra_keys=lambda *_: ((("mm", "a", 0), ("mm", "a", 9), ("cache_salt", "x")), 0))
    unknown = identities(extra_keys=lambda *_: ((("mm", "a", 0), ("mm", "a", 9), ("cache_salt", "x"), ("new", 1)), 0))
    assert known.of(asked) is not None and unknown.of(asked) is None


def test_prompt_embeddings() -> None:
    """Prompts of embeddings have equal keys as far as their embeddings are equal, also where some positions are tokens."""
    tokens, embeds = [0] * 12, torch.arange(24, dtype=torch.float32).reshape(12, 2)
    changed = embeds.clone()
    changed[5, 1] += 1
    mixed = [True] * 4 + [False] * 8
    asked = [
        request(prompt_embeds=embeds),
        request(prompt_embeds=embeds.clone()),
        request(prompt_embeds=changed),
        request(prompt_embeds=embeds.to(torch.bfloat16)),
        request(prompt_embeds=embeds, prompt_is_token_ids=mixed),
        request(),
    ]
    first, same, later, *others = [keys(tokens, one) for one in asked]
    assert first == same and [a == b for a, b in zip(first, later, strict=True)] == [True, False, False]
    assert len({one[0] for one in (first, *others)}) == 4


def test_sessions_that_get_images() -> None:
    """An identity stops describing a session that has got another image; the new one keeps the keys before the image."""
    asked = request([Image(0, 4)])
    first = identity(asked)
    assert first.describes(asked)
    asked.mm_features.append(Image(9, 3).feature())
    second = identity(asked)
    assert not first.describes(asked) and second.describes(asked)
    assert second.inputs[:2] == [*first.inputs, b""] and second.inputs[2]


def test_adapters(tmp_path: Path) -> None:
    """An adapter's identity depends on its files, on vLLM's settings and on how vLLM reads it; not on path, name or number."""
    for name, value, alpha in (("a", 1, 2), ("same", 1, 2), ("other", 2, 2), ("configured", 1, 4)):
        write_adapter(tmp_path / name, value, lora_alpha=alpha)
    paths = [tmp_path / name for name in ("a", "same", "other", "configured")]
    a, same, other, configured = [
        identity(request(lora_request=lora(number, path))).adapter_salt for number, path in enumerate(paths, 1)
    ]
    set_up = identities(settings=b"bfloat16").of(request(lora_request=lora(1, paths[0])))
    fused = identity(request(lora_request=lora(1, paths[0], is_3d_lora_weight=True)))
    assert set_up is not None and a == same
    assert len({a, other, configured, set_up.adapter_salt, fused.adapter_salt, b""}) == 6
    assert identities().of(request(lora_request=lora(1, tmp_path / "missing"))) is None


def test_adapters_in_memory(tmp_path: Path) -> None:
    """KV computed with an adapter is saved only if vLLM has in memory what the files were when it was asked for. After another
    load from the same path nothing of it is saved or loaded, because vLLM's own cache may have KV of both."""
    folder, files, loaded = tmp_path / "a", AdapterFiles(), AdaptersInMemory()

    def asked(number: int) -> Adapter:
        return Adapter(number, files.digest(str(folder)) or b"")

    write_adapter(folder, 1)
    first = asked(1)
    assert loaded.may_load(first) and not loaded.may_save(first)
    loaded.record(1, str(folder), first.digest)
    assert loaded.may_load(first) and loaded.may_save(first)
    write_adapter(folder, 2)
    second = asked(1)
    assert second != first and not loaded.may_load(second) and not loaded.may_save(second)
    loaded.record(1, str(folder), second.digest)
    assert not loaded.may_save(first) and not loaded.may_save(second) and not loaded.may_load(second)
    loaded.record(2, str(tmp_path / "new"), second.digest)
    assert loaded.may_save(Adapter(2, second.digest)) and not loaded.may_save(Adapter(2, first.digest))
    assert loaded.may_save(None) and loaded.may_load(None)


def test_versions_of_weights() -> None:
    """A version that returns has the same salt. A reset ends a version. A version that comes after KV was computed since the
    reset has no name, so that nothing is mixed."""
    version, other = WeightsVersion(), WeightsVersion("one")
    assert version.salt == b""
    version.computed = True
    version.reset()
    unnamed = version.salt
    assert version.set("one") and version.salt == other.salt
    version.computed = True
    assert version.set("one") and not version.set("two")
    assert version.salt not in (unnamed, other.salt, WeightsVersion("two").salt)
    version.reset()
    assert version.set("two") and version.salt == WeightsVersion("two").salt


def test_versions_over_a_cache_that_can_be_seen() -> None:
    """Where vLLM's cache is known to hold KV, a reset or a name leaves the version stale. Once the cache is seen empty, the
    last name that was given is used."""
    version = WeightsVersion()
    version.reset(empty=False)
    assert version.stale
    assert not version.set("one", empty=False) and version.stale and version.salt != WeightsVersion("one").salt
    assert not version.set("two", empty=False)
    assert version.settle() == "two" and not version.stale and version.salt == WeightsVersion("two").salt
    version.computed = True
    assert version.set("three", empty=True), "nothing is left, whatever was computed before"
    version.reset(empty=False)
    assert version.settle() == "" and not version.stale


@pytest.mark.parametrize("empty", [True, False, None])
def test_weights_that_change_without_a_word(empty: bool | None) -> None:
    """Weights that change without a call end a version under which KV was computed, and that of the files; not a name that
    nothing was computed under."""
    files, named = WeightsVersion(), WeightsVersion("one")
    assert files.changed(empty) and files.salt not in (b"", named.salt) and files.stale == (empty is False)
    assert not named.changed(empty) and not named.stale
    named.computed = True
    assert named.changed(empty) and named.salt != WeightsVersion("one").salt and named.stale == (empty is False)


# With a real vLLM


def asks(model: Path, store: list[str] | None, steps: list[dict[str, Any]], **llm: Any) -> list[Any]:
    job = {"model": str(model), "store": store, "steps": steps, "llm": llm}
    found: list[Any] = run("vllm_identity_script.py", job)["answers"]
    return [(answers(one), [each["cached"] for each in one]) for one in found]


LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="FOREWORD_VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.timeout(600)
def test_adapters_under_vllm(tmp_path: Path) -> None:
    """Requests with adapters hit after a restart, under another name, path and number too. Other files under the same path are
    another adapter: while the server runs, after it has loaded them, and after a restart. Each answer is that of vLLM alone."""
    model, asked = make_model(tmp_path / "model"), prompts(7, [100, 65])
    a, b = (str(make_adapter(tmp_path / name, model, seed)) for name, seed in (("a", 1), ("b", 2)))
    used, moved = str(tmp_path / "used"), str(tmp_path / "moved")
    for folder in (used, moved):
        shutil.copytree(a, folder)
    ask, forget = {"ask": asked}, {"forget": False}
    with_a, with_b = {**ask, "adapter": ["a", 1, a]}, {**ask, "adapter": ["b", 2, b]}
    plain, right_a, right_b = (one[0] for one in asks(model, None, [ask, with_a, with_b], **LORA))
    assert len({json.dumps(one) for one in (plain, right_a, right_b)}) == 3

    store, full, nothing = [disk(tmp_path)], [96, 64], [0, 0]
    first = asks(model, store, [ask, with_a, with_b, forget, with_b, with_a, ask], **LORA)
    assert [one[0] for one in first] == [plain, right_a, right_b, right_b, right_a, plain]
    assert [one[1] for one in first] == [nothing] * 3 + [full] * 3

    here = {**ask, "adapter": ["other name", 5, used]}
    again = {**ask, "adapter": ["other name", 5, used, "in place"]}
    swap = {"copy": [b, used]}
    fresh = {**ask, "adapter": ["new", 6, moved]}
    swapped = asks(model, store, [here, forget, swap, here, forget, again, forget, again, fresh], **LORA)
    # vLLM goes on with the old adapter until it loads the new one. The connector neither loads nor saves any of that.
    assert [one[0] for one in swapped] == [right_a, right_a, right_b, right_b, right_a]
    assert [one[1] for one in swapped] == [full, nothing, nothing, nothing, full]

    third = asks(model, store, [{**ask, "adapter": ["other name", 1, used]}, {**ask, "adapter": ["a", 2, a]}], **LORA)
    assert third == [(right_b, full), (right_a, full)]


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="FOREWORD_VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.timeout(600)
def test_versions_of_weights_under_vllm(tmp_path: Path) -> None:
    """Weights that change in place: what was saved under a version is found when the version returns, in another process
    too, and never under another. With a version that is set too late nothing old is found."""
    model, asked = make_model(tmp_path / "model"), prompts(8, [100, 65])
    ask, forget = {"ask": asked}, {"forget": True}
    double, halve = {"weights": 2.0}, {"weights": 0.5}
    one, two = {"version": "one"}, {"version": "two"}
    right, other = (found[0] for found in asks(model, None, [ask, {"forget": False}, double, ask]))
    assert right != other
    steps = [ask, forget, one, ask, forget, double, two, ask, forget, halve, one, ask, forget, double, two, ask]
    found = asks(model, [disk(tmp_path)], steps)
    assert [answer[0] for answer in found] == [right, right, other, right, other]
    full, nothing = [96, 64], [0, 0]
    assert [answer[1] for answer in found] == [nothing, nothing, nothing, full, full]

    # A name counts where vLLM's cache is empty; over KV of other weights it counts once that is dropped.
    early = [double, {"forget": True}, two, ask, {"forget": False}, halve, one, ask]
    late = [double, {"forget": True}, two, ask, halve, one, {"forget": False}, ask]
    for steps in (early, late):
        found = asks(model, [disk(tmp_path)], steps)
        assert [answer[0] for answer in found] == [other, right]
        assert [answer[1] for answer in found] == [full, full]
