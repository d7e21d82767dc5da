"""Costs of removing pods: the blocks that a replica holds, written into its pod where Kubernetes looks for it.

A ReplicaSet that gets smaller removes the pods with the lowest `controller.kubernetes.io/pod-deletion-cost` first. Several
routers write about the same number.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

import aiohttp

from foreword.router.replicas import CONNECTION_ERRORS, ReplicaSpec
from foreword.router.router import Router
from foreword.router_extras.kubernetes import Pod, ServiceSpec, ServiceWatch
from foreword.router_extras.kubernetes_watch import ApiServer

logger = logging.getLogger(__name__)

ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"
_SECONDS: Final = 60.0
# Each change is a write to etcd: smaller ones than this share are left out.
_SHARE: Final = 0.1
_MOST: Final = (1 << 31) - 1
_CALL_SECONDS: Final = 10.0


class PodCosts:
    """Writes the costs of the pods of one Service until cancelled. Runs on the event loop.

    Args:
        pods: by the URLs of their replicas, as of now.
        blocks: the number of blocks that the replica of a URL holds.
    """

    def __init__(self, api: ApiServer, pods: Callable[[], Mapping[str, Pod]], blocks: Callable[[str], int]) -> None:
        self._api, self._pods, self._blocks = api, pods, blocks
        self._written: dict[Pod, int] = {}
        self._refused = False

    async def run(self, seconds: float = _SECONDS) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                async with self._api.session() as session:
                    await self.write(session)
            except CONNECTION_ERRORS as error:
                logger.warning("Kubernetes: cannot write what pods hold: %s", error)

    async def write(self, session: aiohttp.ClientSession) -> None:
        """Write the costs that have changed. Raises what aiohttp raises."""
        pods = dict(self._pods())
        self._written = {pod: cost for pod, cost in self._written.items() if pod in pods.values()}
        for url, pod in pods.items():
            cost, known = min(self._blocks(url), _MOST), self._written.get(pod)
            if known is not None and abs(cost - known) <= _SHARE * known:
                continue
            if await self._put(session, pod, cost):
                self._written[pod] = cost

    async def _put(self, session: aiohttp.ClientSession, pod: Pod, cost: int) -> bool:
        url = f"{self._api.url}/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        change = {"metadata": {"annotations": {ANNOTATION: str(cost)}}}
        headers = {"content-type": "application/merge-patch+json"}
        timeout = aiohttp.ClientTimeout(total=_CALL_SECONDS)
        async with session.patch(url, json=change, headers=headers, timeout=timeout, allow_redirects=False) as response:
            if response.status == 200:
                self._refused = False
                return True
            if response.status != 404 and not self._refused:  # a pod that has left
                self._refused = True
                logger.warning(
                    "Kubernetes: the API server says %d to a patch of pod %s/%s (--pod-deletion-cost)",
                    response.status,
                    pod.namespace,
                    pod.name,
                )
            return False


async def watch_service(router: Router, text: str, changed: Callable[[str, Mapping[ReplicaSpec, bool]], None]) -> None:
    """See `RouterExtras.watch_service`."""
    config = router.config
    service, api = ServiceSpec.parse(text), ApiServer(config.kubernetes_api, config.kubernetes_credentials)
    watch = ServiceWatch(api, service, lambda found: changed(str(service), found))

    def blocks(url: str) -> int:
        pool = router.pool_of(router.upstreams[url]) if url in router.upstreams else None
        return pool.fleet.directory.blocks(url) if pool is not None else 0

    work = [
        watch.run(router.metrics.watch_failed),
        *([PodCosts(api, watch.pods, blocks).run()] if config.pod_deletion_cost else []),
    ]
    await asyncio.gather(*work)
