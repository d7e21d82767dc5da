"""The vLLM connector where products beside it are not installed: it works without what they add, and says what to install."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_stub import stubbed_vllm

from foreword.blocks.keys import Scope
from foreword.blocks.retention import RetentionAnswer
from foreword.blocks.salt import NO_SALT, PUBLIC
from foreword.errors import ConfigError
from foreword.store.tiered import TieredStore
from foreword.store.types import Reach

EXTRAS = "foreword.integrations.vllm_extras"
PACKAGE = "the package foreword-vllm-extras beside foreword-vllm"


@pytest.fixture(scope="module")
def vllm() -> Iterator[Callable[[str], Any]]:
    """Imports a module of the connector."""
    with stubbed_vllm():
        yield lambda name: importlib.import_module(f"foreword.integrations.vllm.{name}")


@pytest.mark.parametrize(
    ("module", "setting", "message"),
    [
        ("foreword.offload.direct_tier", {"direct": True}, r"store\.direct needs .*pip install 'foreword\[direct\]'"),
        (f"{EXTRAS}.usage_notes", {"usage_ledger": "usage.jsonl"}, f"usage_ledger .* needs {PACKAGE}"),
        (f"{EXTRAS}.portable", {"layout": "portable"}, f"layout, unit_tokens and head_units .* need {PACKAGE}"),
        (f"{EXTRAS}.transfer", {"transfer": {}}, f"transfer between instances, .* need {PACKAGE}"),
    ],
)
def test_a_setting_of_another_product(
    vllm: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, module: str, setting: dict[str, Any], message: str
) -> None:
    """A setting that another product fulfils is an error where that is not installed, before a model is loaded; it is taken
    where it is installed."""
    settings = vllm("connector_config").ConnectorSettings
    given = {"store": ["memory://?size=1MiB"], **setting}
    settings.read(given)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=message):
        settings.read(given)
    settings.read({"store": given["store"]})


def test_memory_of_other_processes(vllm: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory tier needs the extras where the scheduler is another process than the workers, with one rank too, and nowhere
    else: that is said before a store opens."""
    read = vllm("connector_config").ConnectorSettings.read
    memory, disk = read({"store": ["memory://?size=1MiB"]}), read({"store": ["disk:///nowhere/kv?size=64MiB"]})
    memory.check_processes(True)
    monkeypatch.setitem(sys.modules, f"{EXTRAS}.transfer", None)
    with pytest.raises(ConfigError, match=f"memory:// with a scheduler apart from its workers need {PACKAGE}"):
        memory.check_processes(True)
    memory.check_processes(False)
    disk.check_processes(True)


def test_events_say_nothing_of_the_tiers(
    vllm: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """KV events are a setting of vLLM: without the extras the server starts, and a warning says what they lack."""
    parts = vllm("connector_extras")
    tiers = [(Reach.PROCESS, "memory")]
    assert parts.tier_events(tiers, [1], [16]).take() == []
    monkeypatch.setitem(sys.modules, f"{EXTRAS}.tier_events", None)
    store = TieredStore([])
    assert parts.tier_watch(store, ()) is parts.tier_events(tiers, [1], [16]) is None
    assert PACKAGE in caplog.text


def test_wishes_are_refused(vllm: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extras a request that wants to keep its prompt, or names its session, is computed, and the answers to both
    say what to install, in the form that the extras give them."""
    monkeypatch.setitem(sys.modules, f"{EXTRAS}.control", None)
    control = vllm("connector_extras").engine_control(None, TieredStore([]))
    params = {"foreword_cache": [{"end": 16}], "foreword_session": {"id": "one"}}
    state = SimpleNamespace(request=SimpleNamespace(kv_transfer_params=params))
    answers = control.ended(state, NO_SALT, ())
    [kept] = answers["foreword_cache"]
    assert PACKAGE in kept["reason"] and RetentionAnswer(**kept) == RetentionAnswer("refused", 0, None, kept["reason"])
    assert kept.keys() == {field.name for field in fields(RetentionAnswer)}
    assert PACKAGE in answers["foreword_session"]["error"]
    assert not control.chain(Scope(b"m", 16, PUBLIC), range(32), ()).public, "no blocks are public"


def test_kv_of_adapters_and_media_is_not_saved(
    vllm: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the extras a request with an adapter, with media or with embeddings has no identity, so its KV is neither saved
    nor loaded, and a warning says what is missing where vLLM takes some. Text alone has one, and is warned of nowhere."""
    parts, identity = vllm("connector_extras"), vllm("request_identity")
    for name in ("adapters", "media"):
        monkeypatch.setitem(sys.modules, f"{EXTRAS}.{name}", None)
    model = SimpleNamespace(multimodal_config=object())
    rich = SimpleNamespace(lora_config=object(), model_config=model)
    plain = SimpleNamespace(lora_config=None, model_config=SimpleNamespace(multimodal_config=None))
    text = SimpleNamespace(lora_request=None, mm_features=(), prompt_embeds=None)
    for config in (plain, rich):
        assert not caplog.text
        digests = parts.adapter_digests(config), parts.input_digests(config, 16, b"")
        found = identity.RequestIdentities(adapters=digests[0], inputs=digests[1])
        asked = [
            SimpleNamespace(**{**vars(text), **more})
            for more in (
                {"lora_request": SimpleNamespace(lora_path="/nowhere", lora_int_id=1)},
                {"mm_features": [SimpleNamespace()]},
                {"prompt_embeds": object()},
            )
        ]
        assert found.of(text) is not None and [found.of(one) for one in asked] == [None] * 3
        loaded = parts.loaded_adapters(config)
        one = identity.Adapter(1, bytes(32))
        assert loaded.may_save(None) and loaded.may_load(None) and not (loaded.may_save(one) or loaded.may_load(one))
    assert caplog.text.count(PACKAGE) == 2 and "LoRA adapters" in caplog.text and "media" in caplog.text
