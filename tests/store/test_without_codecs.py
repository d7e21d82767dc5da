"""Stores where the package with the codecs is not installed: URLs with a codec say what to install."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from foreword.blocks.layout import LayerLayout, Layout
from foreword.errors import StoreConfigError
from foreword.store.urls import check_stores, loss_of, open_store


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
