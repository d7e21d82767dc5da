"""Folders of stores that another user of the host has made, or can write to."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from foreword.blocks.layout import LayerLayout, Layout
from foreword.errors import StoreConfigError
from foreword.store.urls import check_stores, open_store

STRANGER = 65534
LAYOUT = Layout(bytes(32), 16, (LayerLayout(1, 8, 8),), "float32")
root = pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can make a folder of another user")


def refused(folder: Path, scheme: str) -> str:
    """The one sentence with which a server refuses the folder, before it connects and when it opens it."""
    said = []
    for call in (check_stores, lambda urls: open_store(urls, LAYOUT)):
        with pytest.raises(StoreConfigError) as caught:
            call([f"{scheme}://{folder}"])
        said.append(caught.value.message)
    assert said[0] == said[1] and "owner=any" in said[0]
    return said[0]


@pytest.mark.parametrize("scheme", ["disk", "file"])
class TestOwner:
    @root
    def test_a_planted_folder(self, tmp_path: Path, scheme: str) -> None:
        """A folder that another user has made is refused, and used if the operator trusts that user."""
        folder = tmp_path / "planted"
        folder.mkdir(0o777)
        os.chown(folder, STRANGER, STRANGER)
        assert "belongs to user 65534" in refused(folder, scheme)
        open_store([f"{scheme}://{folder}?owner=any"], LAYOUT).close()

    @root
    def test_a_planted_link(self, tmp_path: Path, scheme: str) -> None:
        """A link of another user in the folder's place is refused, although it leads to a folder of ours."""
        (tmp_path / "mine").mkdir(0o700)
        (tmp_path / "link").symlink_to(tmp_path / "mine")
        open_store([f"{scheme}://{tmp_path}/link"], LAYOUT).close()
        os.chown(tmp_path / "link", STRANGER, STRANGER, follow_symlinks=False)
        assert "belongs to user 65534" in refused(tmp_path / "link", scheme)

    def test_a_folder_that_all_can_write(self, tmp_path: Path, scheme: str) -> None:
        """Our own folder is refused while every user can write to it; one that a group can write to is not."""
        folder = tmp_path / "open"
        folder.mkdir()
        folder.chmod(0o1777)
        assert "every user can put blocks into the folder" in refused(folder, scheme)
        folder.chmod(0o2775)
        open_store([f"{scheme}://{folder}"], LAYOUT).close()

    def test_a_folder_that_all_can_replace(self, tmp_path: Path, scheme: str) -> None:
        """A folder above it that all can write to must be sticky."""
        folder = tmp_path / "above" / "mine"
        folder.mkdir(0o700, parents=True)
        (tmp_path / "above").chmod(0o777)
        assert "put another folder in the place of" in refused(folder, scheme)
        (tmp_path / "above").chmod(0o1777)
        open_store([f"{scheme}://{folder}"], LAYOUT).close()

    @root
    def test_tools_read_the_folders_of_a_service(self, tmp_path: Path, scheme: str) -> None:
        """`inspect`, `verify` and `forget` serve nothing: the superuser may use them on the folder of a service's user."""
        open_store([f"{scheme}://{tmp_path}/store"], LAYOUT).close()
        os.chown(tmp_path / "store", STRANGER, STRANGER)
        with closing(open_store([f"{scheme}://{tmp_path}/store"])) as opened:
            assert opened.tiers[0].store.status() is not None
