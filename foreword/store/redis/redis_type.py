"""The type of `redis://` stores. redis-py is imported when one is opened."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import ClassVar, Final
from urllib.parse import urlencode

from foreword.blocks.layout import Layout
from foreword.errors import StoreConfigError
from foreword.store.base import Store
from foreword.store.builtin import missing_library, parse_number
from foreword.store.types import Options, Reach, StoreType, StoreUrl, read_options


class RedisType(StoreType):
    """`redis://host`, and the other forms of `store/redis/addresses.py`. Other options are those of redis-py."""

    label = "redis"
    options: ClassVar[Options] = {"prefix": str, "ttl": lambda text: parse_number(text) or None}

    def __init__(self, reach: Reach = Reach.NETWORK) -> None:
        self.reach = reach

    def check(self, url: StoreUrl) -> None:
        for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
            if name in url.options and not os.path.isfile(url.options[name]):
                raise StoreConfigError(f"{url.shown}: there is no file {url.options[name]} ({name}=)")
        self.open(url, None).close()  # it connects at the first call

    def open(self, url: StoreUrl, layout: Layout | None) -> Store:
        try:
            from foreword.store.redis.redis_store import RedisStore
        except ModuleNotFoundError as error:
            raise missing_library(error, "redis") from None
        query = urlencode({key: value for key, value in url.options.items() if key not in self.options})
        given = read_options(url, self.options, others=True)
        return RedisStore(url.url + (f"?{query}" if query else ""), label=url.label, **given)

    def empty_part(self, url: StoreUrl, name: str) -> StoreUrl:
        prefix = f"{url.options.get('prefix', 'foreword')}-{name}"
        return replace(url, options={**url.options, "prefix": prefix})


REDIS: Final = RedisType()
UNIX: Final = RedisType(Reach.HOST)
