"""`foreword explain` and `foreword top` on a router in front of two real vLLM servers."""

from __future__ import annotations

from pathlib import Path

from explained import explain, sound
from test_explain import balanced, given, routing
from test_explain_vllm import serving
from test_top import shown
from vllm_process import needs_vllm
from vllm_server import make_byte_model

pytestmark = needs_vllm


def test_two_behind_a_router(tmp_path: Path) -> None:
    """A router in front of two vLLMs with one store, and a balancer in its place. Of the three processes a terminal shows load,
    tiers and replicas, and no problem."""
    model, stores = make_byte_model(tmp_path / "model"), [f"disk://{tmp_path}/kv?size=64MiB"]
    with serving(model, tmp_path, stores) as first, serving(model, tmp_path, stores, core=1) as second:
        with routing(2, *given([first, second])) as url:
            said = explain(url)
            sound(said)
            places = [link["text"].partition(": ")[0] for link in said.links if link["name"] == "written"]
            assert places == [first, second]
            status, view = shown(url, first, second)
            assert (status, view["problems"]) == (0, [])
            assert [one["kind"] for one in view["servers"]] == ["router", "vLLM", "vLLM"]
            assert [(one["url"], one["tier"], one["state"]) for one in view["tiers"]] == [
                (first, "disk", "ok"),
                (second, "disk", "ok"),
            ]
            assert [one["up"] for one in view["replicas"]] == [True, True]
        with balanced(first, second) as url:
            sound(explain(url))
