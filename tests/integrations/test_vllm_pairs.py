"""Pairs of real vLLM servers on one store: equal KV is found, other KV never, and unmeasured servers share nothing.

`vllm_pairs.py` runs all pairs; here are those of each class.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm_pairs import FEW, PAIRS, Bench, Pair
from vllm_process import needs_vllm

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield Bench(tmp_path_factory.mktemp("pairs"))


@pytest.mark.parametrize(
    "pair", [one for one in PAIRS if one.name in FEW], ids=lambda pair: pair.name.replace(" ", "-")
)
def test_a_pair(pair: Pair, bench: Bench) -> None:
    """The second server finds what it would find of its own KV, or nothing; its answers are those that it gives alone. Where
    the weights are the same and it finds nothing, its log says why."""
    outcome = bench.run(pair)
    assert outcome.right(pair), outcome
    assert pair.equal or outcome.why or "weights" in pair.name or "*." in pair.name, (
        "a cold start that nothing explains"
    )
