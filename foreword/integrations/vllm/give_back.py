"""Gives vLLM its blocks back before it resets its cache, so that a reset succeeds where it would without a connector.

vLLM resets its cache on request, and when it pauses or sleeps so that weights can be changed. It refuses while a block is in
use. Two kinds are in use for the connector only: blocks that a load fills, also those of aborted requests, and last windows
that a worker in another process has yet to copy. A step gives them back. A paused engine makes no step, and in one process
there is none when no request is left: no promise may depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from foreword.integrations.vllm.scheduler_side import ForewordConnectorScheduler
from foreword.integrations.vllm.step_messages import BlockSave

# Steps of vLLM's scheduler: what it does with a step's report, and with a request whose load has failed.
_STEPS = ("_update_from_kv_xfer_finished", "_handle_failed_recving", "_handle_blocked_waiting_request")


def give_back(
    core: Any, side: ForewordConnectorScheduler, *, running: bool, told: Callable[[Sequence[str]], None] | None
) -> None:
    """Called in the engine's thread before a reset, between two steps.

    Args:
        core: vLLM's `EngineCore`.
        running: live requests give their blocks back too, and start over; else only requests that have ended do.
        told: hears which ended requests need not be reported by a worker any more. None: another connector may keep blocks of
            the same requests, so they are left to a step.
    """
    scheduler, requests = core.scheduler, core.scheduler.requests
    if not all(hasattr(scheduler, name) for name in _STEPS):
        return  # another vLLM, which refuses as it always did
    names = [one for one in side.loading() if one in requests and (running or requests[one].is_finished())]
    saves, finished = side.take_last() if told is not None else ([], [])
    # Blocks of live requests that wait to be saved are taken back too, if these start over.
    lost = [name for name, one in requests.items() if running and not RequestStatus.is_finished(one.status)]
    kept = set(side.keeping & requests.keys()) if told is not None else set()
    ended: set[str] = set()
    if names or saves or lost or kept:
        every = [*{*names, *lost, *kept}]
        ended = set().union(*core.model_executor.collective_rpc(end_in_worker, args=(every, saves)))
    finished = [*{*finished, *(kept & ended)}]
    ended -= kept
    if told is not None:
        told(finished)
    waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
    live = {name for name, one in requests.items() if running and one.status == waiting}
    loaded = live & scheduler.finished_recving_kv_req_ids
    if ended or finished:
        report = KVConnectorOutput(finished_sending=set(finished), finished_recving=ended, failed_recving=ended)
        scheduler._update_from_kv_xfer_finished(report)
    for name in sorted(live & ended | loaded):
        scheduler._handle_failed_recving({name})
        scheduler._handle_blocked_waiting_request(requests[name])


def end_in_worker(worker: Any, names: Sequence[str], saves: Sequence[BlockSave]) -> set[str]:
    """Called by vLLM in each worker: end loads, and save blocks. Returns the requests whose loads have ended by this."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    group = get_kv_transfer_group()
    ours = [one for one in getattr(group, "_connectors", [group]) if hasattr(one, "end_work")]
    return {name for one in ours for name in one.end_work(names, saves)}
