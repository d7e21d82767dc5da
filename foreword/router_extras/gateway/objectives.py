"""Objectives that a cluster has: the `InferenceObjective`s of an `InferencePool`, which are watched.

Until the API server has answered, and of a name that no object has, the picker knows no objective.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from foreword.process_config import RouterConfig
from foreword.router_extras.kubernetes_watch import ApiObject, ApiServer, ObjectsOf, ObjectWatch

logger = logging.getLogger(__name__)

POOL: Final = re.compile(r"([a-z0-9][a-z0-9-]{0,62})/([a-z0-9][a-z0-9.-]{0,252})")
# llm-d's group, and that of the inference extension before it. A cluster may have one or both; of two objectives of one name
# that of the newer group counts.
_GROUPS: Final = ("llm-d.ai/v1alpha2", "inference.networking.x-k8s.io/v1alpha2")
# Replicas count in 32 bits.
_MOST: Final = (1 << 31) - 1


class _PoolRef(msgspec.Struct):
    name: str = ""


class _Spec(msgspec.Struct):
    pool: _PoolRef = msgspec.field(name="poolRef", default_factory=_PoolRef)
    priority: int | None = None


class InferenceObjective(ApiObject):
    """`inference.networking.x-k8s.io/v1alpha2` and `llm-d.ai/v1alpha2`; what is not here is ignored."""

    spec: _Spec = msgspec.field(default_factory=_Spec)


class PoolObjectives:
    """Objectives of one pool, as of the API server's last answers.

    Args:
        name: `NAMESPACE/POOL`, as `POOL` matches it.
    """

    def __init__(self, config: RouterConfig, name: str) -> None:
        """Raises ConfigError if it is not known where the API server is."""
        self._api = ApiServer(config.kubernetes_api, config.kubernetes_credentials)
        self._name = name
        self._namespace, _, self._pool = name.partition("/")
        self._watches = [self._watch(group) for group in _GROUPS]
        # The number of objects in the namespace, by group.
        self._number: dict[str, int] = {}

    def get(self, name: str) -> int | None:
        """The priority of an objective; higher is more urgent. None without one of this name."""
        found = (watch.objects.get(name) for watch in self._watches)
        one = next((one for one in found if one is not None and one.spec.pool.name == self._pool), None)
        return max(min(one.spec.priority or 0, _MOST), -_MOST) if one is not None else None

    def watches(self, failed: Callable[[str], object]) -> Iterator[Coroutine[Any, Any, None]]:
        """See `ObjectWatch.run`."""
        return (watch.run(failed) for watch in self._watches)

    def _watch(self, group: str) -> ObjectWatch[InferenceObjective]:
        purpose = f"objectives ({group}) of {self._name}"
        what = ObjectsOf(group, "inferenceobjectives", self._namespace, purpose, optional=True)
        return ObjectWatch(self._api, what, InferenceObjective, partial(self._changed, group))

    def _changed(self, group: str, objects: Mapping[str, InferenceObjective]) -> None:
        """Log the first answer, the first objects after none, and when all are gone. Every event comes here: the others look at
        no object."""
        before, self._number[group] = self._number.get(group), len(objects)
        if before is None or (before > 0) != bool(objects):
            ours = sum(one.spec.pool.name == self._pool for one in objects.values())
            text = "Kubernetes: %d objectives (%s) of %s, of %d in the namespace"
            logger.info(text, ours, group, self._name, len(objects))
