"""`/v1/prefixes`: what each method does, as a status and JSON. Used by Foreword's server and by the middleware for vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foreword.prefixes.async_service import AsyncPrefixes
from foreword.prefixes.book import Message, NamedPrefix


def describe(prefix: NamedPrefix) -> dict[str, Any]:
    """A prefix as JSON, without its content. `bytes` is the KV it pins; times are seconds since 1970."""
    return {
        "id": prefix.name,
        "object": "prefix",
        "name": prefix.name,
        "version": prefix.version,
        "kind": prefix.kind,
        "num_tokens": len(prefix.tokens),
        "bytes": prefix.bytes,
        "ready": prefix.ready,
        "created": int(prefix.created),
        "uses": prefix.uses,
        "hit_tokens": prefix.hit_tokens,
        "last_used": prefix.last_used,
    }


class PrefixEndpoints:
    """The methods of `/v1/prefixes` for one tenant. Each raises ForewordError."""

    def __init__(self, prefixes: AsyncPrefixes, salt: bytes = b"") -> None:
        self._prefixes = prefixes
        self._salt = salt

    async def list(self) -> dict[str, Any]:
        """GET: the tenant's prefixes, the bytes they pin, and the budget for those of all tenants."""
        await self._prefixes.refresh(self._salt)
        found = self._prefixes.list(salt=self._salt)
        return {
            "object": "list",
            "data": [describe(prefix) for prefix in found],
            "pinned_bytes": sum(prefix.bytes for prefix in found),
            "budget_bytes": self._prefixes.budget_bytes,
        }

    async def show(self, name: str) -> dict[str, Any]:
        """GET of a name: one prefix with its content."""
        await self._prefixes.refresh(self._salt, name)
        prefix = self._prefixes.get(name, salt=self._salt)
        return {**describe(prefix), "content" if prefix.kind == "text" else "messages": prefix.content}

    async def add(
        self, name: str, content: str | None, messages: Sequence[Message] | None, *, replace: bool
    ) -> tuple[int, dict[str, Any]]:
        """POST, and PUT of a name: register a prefix, or a new version of it. 201 for a first version, else 200."""
        prefix = await self._prefixes.add(name, content=content, messages=messages, salt=self._salt, replace=replace)
        return 201 if prefix.version == 1 else 200, describe(prefix)

    async def remove(self, name: str) -> dict[str, Any]:
        """DELETE of a name: remove a prefix and unpin its KV."""
        removed = await self._prefixes.remove(name, salt=self._salt)
        return {"id": removed.name, "object": "prefix", "deleted": True, "version": removed.version}
