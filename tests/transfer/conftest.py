"""Where a test's links have NIXL among them, it runs in a network of its own, or is skipped."""

from collections.abc import Iterator

import pytest
from networks import private_network


@pytest.fixture(autouse=True)
def network(request: pytest.FixtureRequest) -> Iterator[None]:
    params = getattr(getattr(request.node, "callspec", None), "params", {})
    links = [*params.values(), getattr(request.cls, "links_of", ())]
    if any("nixl" in one for one in links if isinstance(one, str | tuple)):
        yield from private_network()
    else:
        yield
