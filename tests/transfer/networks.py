"""The links that tests run over."""

import pytest

LINKS = {"tcp": ("tcp",), "shm": ("shm", "tcp")}
over_each_link = pytest.mark.parametrize("links", LINKS.values(), ids=LINKS)
