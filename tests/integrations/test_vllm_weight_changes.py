"""Weights that change while vLLM runs, without a word to the connector (`weight_changes.py`)."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm_stub import stubbed_vllm

from foreword.integrations.vllm.weight_changes import follow_loads, notice_changes
from foreword.integrations.vllm.weights import follow_engine


@pytest.fixture(autouse=True)
def vllm() -> Iterator[None]:
    """A stand-in whose workers have no methods."""
    with stubbed_vllm():
        yield


class Workers:
    """Two workers of vLLM with a model each, and an extension that is called `tune`."""

    def __init__(self, *models: nn.Module) -> None:
        self.model_executor = self
        self.workers = [SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda one=one: one)) for one in models]

    def collective_rpc(self, method: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        return [method(worker, *args) for worker in self.workers]


def made() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(3))
    model.load_weights = lambda weights: model.load_state_dict(dict(weights), strict=False)  # type: ignore[assignment]
    return model


def exchange(model: nn.Module) -> None:
    model[0], model[1] = model[1], model[0]  # type: ignore[index, operator]


def swap_rows(model: nn.Module) -> None:
    model[1].weight.data[[1, 2]] = model[1].weight.data[[2, 1]]  # type: ignore[index, union-attr]


def half(model: nn.Module) -> None:
    model[2].running_mean.half()  # type: ignore[index, operator, union-attr]


@pytest.mark.parametrize(
    ("do", "changes"),
    [
        (exchange, True),
        (swap_rows, True),
        (lambda model: model[0].bias.data.mul_(1 + 2**-20), True),
        (lambda model: model[2].running_mean.add_(1), True),
        (lambda model: model.load_weights([]), True),
        (lambda model: model[0].weight.sum().item(), False),
        (half, False),
    ],
)
def test_functions_that_change_weights(do: Callable[[nn.Module], object], changes: bool) -> None:
    """Around a function that is called in the workers a change of any byte is seen, in any of them, and else none."""
    told: list[int] = []
    models = made(), made()
    for one in models:
        follow_loads(one)
    compare = notice_changes(Workers(*models), lambda worker: None, lambda: told.append(1))
    assert not told and compare is not None
    do(models[1])
    compare()
    assert bool(told) == changes


def test_methods_that_change_weights() -> None:
    """vLLM's own methods are known by name. An extension's counts where it loads weights."""
    told: list[str] = []
    model = made()
    follow_loads(model)
    core = Workers(model)
    assert notice_changes(core, "update_weights", lambda: told.append("update")) is None and told == ["update"]
    for loads in (False, True):
        told.clear()
        compare = notice_changes(core, "tune", lambda: told.append("tuned"))
        assert compare is not None
        swap_rows(model)  # not seen
        if loads:
            model.load_weights([])  # type: ignore[operator]
        compare()
        assert told == ["tuned"] * loads


def test_weights_that_are_loaded_beside_vllm() -> None:
    """A trainer in the same process calls the model's `load_weights`: each listener hears of it before, while it lives."""

    class Listener:
        def __init__(self) -> None:
            self.heard: list[float] = []

        def hear(self) -> None:
            self.heard.append(float(model[0].bias.data[0]))  # type: ignore[index, union-attr]

    model, one, two = made(), Listener(), Listener()
    before = float(model[0].bias.data[0])  # type: ignore[index, union-attr]
    follow_loads(model, one.hear)
    follow_loads(model, two.hear)
    del two
    model.load_weights([("0.bias", torch.zeros(8))])  # type: ignore[operator]
    assert one.heard == [before] and not model[0].bias.data.any()  # type: ignore[index, union-attr]


class Engine:
    """vLLM's `EngineCore`: the class stays, engines come and go."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(model_config=object())

    def collective_rpc(self, method: str) -> str:
        return method


class Listener:
    """A connector, which has the KV cache of its engine."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def told(self, method: str) -> None:
        self.heard.append(method)

    def asked(self, core: Any, method: str) -> Callable[[], None]:
        self.heard.append(f"before {method}")
        return lambda: self.heard.append(f"end of {method}")


def test_engines_of_the_past_keep_nothing() -> None:
    """A connector hears of its own engine's calls, not of another one's. It ends with its engine: vLLM's class, which later
    engines in the process have too, does not keep it."""
    module: Any = importlib.import_module("vllm.v1.engine.core")
    module.EngineCore = type("EngineCore", (Engine,), {"collective_rpc": Engine.collective_rpc})
    engines, listeners = [module.EngineCore() for _ in range(2)], [Listener() for _ in range(2)]
    for engine, listener in zip(engines, listeners, strict=True):
        assert follow_engine(engine.vllm_config, "collective_rpc", listener.told)
        assert follow_engine(engine.vllm_config, "collective_rpc", listener.asked, before=True)
    assert engines[0].collective_rpc("one") == "one"
    assert [one.heard for one in listeners] == [["before one", "end of one", "one"], []]
    gone = weakref.ref(listeners.pop(0))
    gc.collect()
    assert gone() is None
    assert engines[0].collective_rpc("two") == "two" and engines[1].collective_rpc("three") == "three"
    assert listeners[0].heard == ["before three", "end of three", "three"]
