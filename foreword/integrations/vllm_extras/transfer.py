"""Implements the connector's interface for other processes (`foreword.integrations.vllm.connector_extras`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import torch

from foreword.blocks.layout import Layout
from foreword.config_layers import build
from foreword.errors import ConfigError
from foreword.integrations.vllm.connector_config import ConnectorSettings, KVCacheInfo
from foreword.integrations.vllm.connector_extras import Handoffs
from foreword.integrations.vllm_extras.endpoints import InstanceConnections, LookupEndpoint, rank_config
from foreword.integrations.vllm_extras.handoff import HandoffScheduler
from foreword.integrations.vllm_extras.interfaces import Endpoint, InstanceEndpoint, TransferExtra
from foreword.integrations.vllm_extras.peer_ranks import WorkersStores, lookup_peer_opener, rank_peer_opener
from foreword.store.base import Store
from foreword.store.types import Opener
from foreword.store_config import EncryptionConfig
from foreword.transfer.checks import check_listener, check_stores_and_peers
from foreword.transfer.tls import check_encrypted
from foreword.transfer_config import TransferConfig


class VllmTransfer(TransferExtra):
    """Transfers of KV under vLLM."""

    def config(self, given: object) -> TransferConfig:
        if not isinstance(given, dict):
            raise ConfigError(
                f'transfer in kv_connector_extra_config is an object: {{"bind": "0.0.0.0:9100"}}, not {given!r}'
            )
        values = dict(given)
        if "secret" in values:
            raise ConfigError(
                "a secret in kv_connector_extra_config would appear in logs; name a variable with secret_env"
            )
        variable = values.pop("secret_env", None)
        if variable is not None:
            if not isinstance(variable, str) or variable not in os.environ:
                raise ConfigError(f"transfer.secret_env: there is no environment variable {variable}")
            values["secret"] = os.environ[variable]
        return build(TransferConfig, "transfer", values)

    def check(
        self, urls: Sequence[str], transfer: TransferConfig | None, encryption: EncryptionConfig, *, listens: bool
    ) -> None:
        check_stores_and_peers(urls, transfer or TransferConfig(), encryption)
        if transfer is not None:
            check_encrypted(transfer, encryption)
            if listens:
                check_listener(transfer, encryption)

    def handoffs(self, info: KVCacheInfo, settings: ConnectorSettings) -> Handoffs:
        return HandoffScheduler(info, settings)

    def instances(
        self,
        settings: ConnectorSettings,
        layouts: Sequence[Layout],
        tensors: Sequence[Sequence[torch.Tensor]],
        memory: Sequence[Store],
        *,
        producers: str,
        num_blocks: int,
    ) -> InstanceEndpoint:
        config = _of_rank(settings, layouts, max(sum(map(_block_bytes, views)) for views in tensors))
        return InstanceConnections(
            config, layouts, tensors, memory, listens=settings.listens, producers=producers, num_blocks=num_blocks
        )

    def workers_memory(self, layouts: Sequence[Layout], memory: Sequence[Store], engine: str, rank: int) -> Endpoint:
        return LookupEndpoint(layouts, memory, engine, rank)

    def workers_stores(self, label: str) -> WorkersStores:
        return WorkersStores(label)

    def peers_of_rank(self, settings: ConnectorSettings, layouts: Sequence[Layout], longest: int) -> Opener:
        rank, ranks = layouts[0].shard
        open_rank = rank_peer_opener(_of_rank(settings, layouts, longest), rank, ranks)
        # Both sides name the layout of the first group when they connect, whichever has the longest blocks.
        return lambda place, _: open_rank(place, layouts[0])

    def lookup_peers(self, settings: ConnectorSettings, layouts: Sequence[Sequence[Layout]]) -> Opener:
        return lookup_peer_opener(settings.transfer or TransferConfig(), layouts)


def _of_rank(settings: ConnectorSettings, layouts: Sequence[Layout], longest: int) -> TransferConfig:
    return rank_config(settings.transfer or TransferConfig(), layouts[0].shard, longest)


def _block_bytes(view: torch.Tensor) -> int:
    return view[0].numel() * view.element_size()


TRANSFER: Final = VllmTransfer()
