"""The type of `s3://`, `gs://`, `az://` and `file://` stores. obstore is imported when one is opened."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from typing import Any, ClassVar, Final

from foreword.blocks.layout import Layout
from foreword.config import check_folder
from foreword.errors import StoreConfigError
from foreword.store.base import Store
from foreword.store.builtin import holds_store, missing_library, parse_number, refuse_host, require_owner
from foreword.store.types import Options, StoreType, StoreUrl, read_options


class ObjectsType(StoreType):
    """`s3://bucket/path`, `gs://`, `az://`, `file:///folder`. Other options are those of obstore."""

    label = "objects"
    options: ClassVar[Options] = {"prefix": str, "chunk": int, "parallel": int, "touch": parse_number}

    def check(self, url: StoreUrl) -> None:
        try:
            from foreword.store.object.client import open_client
            from foreword.store.object.object_store import ObjectStore
        except ModuleNotFoundError as error:
            raise missing_library(error, "s3") from None
        settings = self._settings(url)
        others = {key: settings.pop(key) for key in list(settings) if key not in self.options}
        ObjectStore.check_options(**settings)
        if url.scheme != "file":
            for key, text in others.items():
                if key.endswith("endpoint") and not re.match("https?://[^/]", text):
                    raise StoreConfigError(f"{url.shown}: {key}= takes a URL such as https://host:9000, not {text!r}")
            open_client(url.url, others)
            return
        refuse_host(url, "file:///srv/foreword")
        if not url.path:
            raise StoreConfigError("an object store in a folder needs the folder: file:///srv/foreword")
        owner = others.pop("owner", None)
        if others or owner not in (None, "me", "any"):
            wrong = next(iter(others), "owner")
            raise StoreConfigError(f"{url.shown}: unknown option {wrong!r}: a folder has no options but owner=any")
        require_owner(url)
        check_folder(url.path)

    def exists(self, url: StoreUrl) -> bool:
        return url.scheme != "file" or holds_store(url.path)

    def open(self, url: StoreUrl, layout: Layout | None) -> Store:
        try:
            from foreword.store.object.object_store import ObjectStore
        except ModuleNotFoundError as error:
            raise missing_library(error, "s3") from None
        settings = self._settings(url)
        if url.scheme == "file":
            settings.pop("owner", None)
        store = ObjectStore(url.url, label=url.label, **settings)
        if url.scheme == "file" and layout is not None:
            require_owner(url, store)
        return store

    def empty_part(self, url: StoreUrl, name: str) -> StoreUrl:
        return replace(url, url=f"{url.url.rstrip('/')}/{name}", path=f"{url.path.rstrip('/')}/{name}")

    def remove_part(self, part: StoreUrl) -> None:
        if part.scheme == "file":
            shutil.rmtree(part.path, ignore_errors=True)
        else:
            super().remove_part(part)

    def _settings(self, url: StoreUrl) -> dict[str, Any]:
        return {**url.options, **read_options(url, self.options, others=True)}


OBJECTS: Final = ObjectsType()
