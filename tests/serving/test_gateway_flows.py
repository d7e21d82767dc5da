"""The queue of a picker whose gateway names flows: tenants share first, then the flows of each."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from foreword.request_errors import QueueFull
from foreword.router_extras.gateway.flows import FlowQueue, flow_name, tenant_of
from foreword.routing.queue import QueueEntry

WEIGHTS = {"a": 2.0, "b": 1.0, "heavy": 3.0}


def flow(tenant: str, fairness: str = "") -> str:
    return flow_name(tenant, fairness, WEIGHTS)


def served(queue: FlowQueue[None], count: int) -> Counter[str]:
    """The cost of the next requests, by flow."""
    found = Counter[str]()
    for _ in range(count):
        entry = queue.pop(0.0)
        assert entry is not None
        found[entry.tenant] += int(entry.cost)
    return found


def by_tenant(costs: Counter[str]) -> dict[str, int]:
    return {name: sum(cost for one, cost in costs.items() if tenant_of(one) == name) for name in map(tenant_of, costs)}


@pytest.mark.parametrize("ids", [1, 8, 400])
def test_flows_do_not_change_a_tenants_share(ids: int) -> None:
    """However many fairness ids a tenant's requests have, also a new one for each, and also another tenant's name, tenants are
    served by their weights: its own is neither multiplied nor lost."""
    queue, draw = FlowQueue[None](4000, WEIGHTS), random.Random(ids)
    names = ["b", *(f"id{number}" for number in range(1, ids))]
    for number in range(1000):
        queue.push(None, flow("a", names[number % ids]), draw.randint(1, 20), 0.0)
        queue.push(None, flow("b"), draw.randint(1, 20), 0.0)
    shares = by_tenant(served(queue, 900))
    assert shares["a"] / shares["b"] == pytest.approx(2.0, rel=0.05)


def test_new_flows_do_not_overtake() -> None:
    """While tenants wait, one that sends each request as a flow of its own gets its share, not the next place each time."""
    queue = FlowQueue[None](4000, {})
    for _ in range(100):
        queue.push(None, "quiet", 1, 0.0)
    found = Counter[str]()
    for number in range(100):
        queue.push(None, flow_name("flood", f"new{number}", ()), 1, 0.0)
        found += Counter(by_tenant(served(queue, 1)))
    assert found["quiet"] == pytest.approx(50, abs=1)


def test_flows_share_within_their_tenant() -> None:
    """The flows of a tenant are served equally, whatever their requests cost, those with a weight by it; requests without an id
    are a flow too."""
    queue, draw = FlowQueue[None](4000, WEIGHTS), random.Random(5)
    for _ in range(900):
        for name, most in (("", 20), ("x", 5), ("heavy", 20)):
            queue.push(None, flow("a", name), draw.randint(1, most), 0.0)
    found = served(queue, 900)
    assert found[flow("a", "x")] / found[flow("a")] == pytest.approx(1.0, rel=0.1)
    assert found[flow("a", "heavy")] / found[flow("a")] == pytest.approx(3.0, rel=0.1)


def test_flows_are_bounded_and_apart() -> None:
    """A tenant has at most 1,024 flows beside those with weights, and no id is a flow of another tenant's, or a tenant."""
    ids = [f"id{number}" for number in range(5000)]
    flows = {tenant: {flow(tenant, one) for one in [*ids, "a", "b", "heavy", "\ud800"]} for tenant in ("a", "b", "a/1")}
    assert all(1000 < len(found) <= 1024 + len(WEIGHTS) for found in flows.values())
    assert all(tenant_of(one) == tenant for tenant, found in flows.items() for one in found)
    assert len(set().union(*flows.values())) == sum(map(len, flows.values()))


def test_a_full_queue_displaces_by_tenant_then_by_flow() -> None:
    """In a full queue the tenant with the most entries for its weight loses the newest one of its flow with the most; within
    this tenant, a flow with fewer entries takes the place of one of the flow with the most, which itself is refused."""
    queue = FlowQueue[str](9, {"a": 1.5})
    for number in range(6):
        queue.push(f"a/x{number}", flow_name("a", "x", ()), 1, 0.0)
    queue.push("a/y", flow_name("a", "y", ()), 1, 0.0)
    for number in range(2):
        queue.push(f"b{number}", "b", 1, 0.0)
    with pytest.raises(QueueFull, match=r"9 requests are queued already; try again in \d+ s"):
        queue.push("a", flow_name("a", "x", ()), 1, 0.0)
    for tenant, lost in ((flow_name("a", "z", ()), "a/x5"), (flow_name("b", "w", ()), "a/x4"), ("c", "a/x3")):
        _, displaced = queue.push("new", tenant, 1, 0.0)
        assert displaced is not None and displaced.item == lost
    assert (queue.queued("a"), queue.queued("b"), queue.queued("c"), len(queue)) == (5, 3, 1, 9)
    with pytest.raises(QueueFull):
        queue.push("b", "b", 1, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost(seed: int) -> None:
    """Whatever comes, is served and gives up: each request leaves the queue once, each flow in order, and the counts are those
    of a list."""
    draw, queue = random.Random(seed), FlowQueue[int](20, WEIGHTS)
    inside: list[QueueEntry[int]] = []
    for number in range(3000):
        action = draw.random()
        if action < 0.5:
            name = flow(draw.choice("abc"), draw.choice(["", "a", "x", "y", "heavy"]))
            try:
                entry, displaced = queue.push(number, name, draw.randint(0, 9), 0.0)
            except QueueFull:
                assert len(inside) == 20
                continue
            assert (displaced is not None) == (len(inside) == 20)
            if displaced is not None:
                inside.remove(displaced)
            inside.append(entry)
        elif action < 0.8:
            entry_or_none = queue.pop(0.0)
            assert (entry_or_none is None) == (not inside)
            if entry_or_none is not None:
                assert entry_or_none is next(one for one in inside if one.tenant == entry_or_none.tenant)
                inside.remove(entry_or_none)
        elif inside:
            given_up = inside.pop(draw.randrange(len(inside)))
            assert queue.remove(given_up) and not queue.remove(given_up)
        assert len(queue) == len(inside) and queue.cost == sum(one.cost for one in inside)
        held = Counter(tenant_of(one.tenant) for one in inside)
        assert all(queue.queued(name) == held[name] for name in "abc")
