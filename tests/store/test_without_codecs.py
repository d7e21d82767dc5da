"""Stores where the package with codecs and rules of admission is not installed: URLs with one say what to install."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import pytest

from foreword.blocks.layout import LayerLayout, Layout
from foreword.errors import StoreConfigError
from foreword.store.urls import check_stores, loss_of, open_store, parse


def test_a_codec_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are never left unencoded in silence: a codec is an error that says what to install, when URLs are checked, when
    the loss is asked for, and when a store is opened. Without a codec nothing is missing."""
    monkeypatch.setitem(sys.modules, "foreword.store.codec", None)
    layout = Layout(b"m" * 32, 16, (LayerLayout(1, 8, 8),), "float32")
    plain = f"disk://{tmp_path}/kv?size=1MiB"
    assert check_stores([plain]) and loss_of([plain]) == ""
    open_store([plain], layout).close()
    coded = f"{plain}&codec=int8"
    for call in (
        lambda: check_stores([coded]),
        lambda: loss_of([coded]),
        lambda: open_store([coded], layout),
    ):
        with pytest.raises(
            StoreConfigError, match=r"'int8' needs foreword-stores: pip install 'foreword\[compression\]'"
        ):
            call()


@pytest.mark.parametrize("option", ["admit=second", "min_tokens=64", "write_rate=1MB", "hold=1MiB"])
def test_a_rule_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    """No rule is left out in silence: an option that a rule needs is an error that names the package, wherever the URL is read.
    Wrong values are named as ever, and a store without a rule takes every block."""
    monkeypatch.setitem(sys.modules, "foreword.store.tier_admission", None)
    memory, plain = "memory://?size=1MiB", f"disk://{tmp_path}/kv?size=1MiB"
    for call in (parse, lambda url: check_stores([memory, url]), lambda url: open_store([memory, url])):
        with pytest.raises(StoreConfigError, match=rf"{option.partition('=')[0]} needs foreword-stores"):
            call(f"{plain}&{option}")
    with pytest.raises(StoreConfigError, match="min_tokens"):
        parse(f"{plain}&min_tokens=many")
    with closing(open_store([memory, plain])) as store:
        assert not store.selective and not store.defers
