"""The stores of an engine, as named prefixes use them: their records, and the pins of their blocks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from foreword.blocks.keys import Scope
from foreword.blocks.public_blocks import PublicBlocks
from foreword.blocks.salt import Salt, tenant_digest
from foreword.errors import StoreError
from foreword.prefixes.book import NamedPrefix
from foreword.prefixes.lease_records import PREFIXES, READ_SECONDS, PrefixRecord
from foreword.prefixes.pins import StorePins
from foreword.store.shared_records import FoundRecords, SharedRecords, leave
from foreword.store.tiered import TieredStore

logger = logging.getLogger(__name__)


def models_with_names(store: TieredStore) -> set[str]:
    """The models of whose named prefixes a store that answers has records. By the first digits of what names them."""
    found = SharedRecords(store, PREFIXES, READ_SECONDS).scan(
        PREFIXES.key(""), failed=leave, unread=leave, within=READ_SECONDS
    )
    return {key.split("/")[1] for key in found.keys}


class PrefixStorage:
    """The stores of an engine, as named prefixes use them. All methods block, for seconds at most. Here the device's budget is
    the only bound, as in Foreword's own engine.

    Args:
        model_name: for tools.
        pins: of the model's leases. Prefixes belong to one model.
        block_size: tokens per block key; 0 if it is not known.
        public: which blocks are public, if the engine says so.
        earlier: the model in the record keys of earlier builds, which identified it otherwise; "" if there are none of those.
            Their named prefixes are taken over (`take_over`), and a removal ends both.
    """

    def __init__(
        self,
        store: TieredStore,
        pins: StorePins,
        model_name: str,
        block_size: int,
        public: PublicBlocks | None = None,
        earlier: str = "",
    ) -> None:
        self.pins, self.block_size, self._model_name, self._earlier = pins, block_size, model_name, earlier
        self.public = public or PublicBlocks()
        self._records = SharedRecords(store, PREFIXES, READ_SECONDS)
        self.take_over()

    def take_over(self) -> None:
        """Write the named prefixes of earlier builds under the name that the model has now. Their KV is not found under it, so
        they name no blocks; servers of those builds keep theirs. A store that fails is asked again at the next start."""
        if not self._earlier:
            return
        before, now = PREFIXES.key(self._earlier, ""), PREFIXES.key(self.pins.named, "")
        try:
            known = self._records.scan(now).keys
            for key, record in self._records.scan(before).values.items():
                if now + key.removeprefix(before) not in known:
                    bare = msgspec.structs.replace(record, root="", keys=b"", last_key="", format=2)
                    self._records.put(now + key.removeprefix(before), bare)
        except StoreError as error:
            logger.warning("the named prefixes of an earlier build are not all taken over: %s", error.message)

    def _key(self, name: str, salt: bytes, model: str = "") -> str:
        return PREFIXES.key(model or self.pins.named, self.tenant(salt), name)

    def tenant(self, salt: bytes) -> str:
        """Digest of a tenant."""
        return tenant_digest(self.current(salt))

    def chain(self, tokens: Sequence[int], salt: bytes) -> tuple[bytes, list[bytes]]:
        """Root key of a prefix, and keys of its blocks behind which requests continue; none if they are not known."""
        scope = Scope(bytes.fromhex(self.pins.model), self.block_size, Salt(salt))
        return scope.root(), self.public.keys_of(scope, tokens)

    def check_room(self, name: str, tokens: Sequence[int], salt: bytes) -> None:
        """Raises PrefixBudgetExceeded if a store cannot pin what the prefix does not share with other kept ones."""

    def current(self, salt: bytes) -> bytes:
        """The salt of a tenant in its generation now, where callers do not know it."""
        return salt

    def all(self, salt: bytes) -> FoundRecords[PrefixRecord]:
        """The records of a tenant. Raises StoreError if they cannot be listed."""
        return self._records.scan(self._key("", salt))

    def get(self, name: str, salt: bytes) -> PrefixRecord | None:
        """Raises StoreError."""
        return self._records.get(self._key(name, salt))

    def exists(self, name: str, salt: bytes) -> bool:
        """Whether there is a record, also one that cannot be read. Raises StoreError."""
        return self._records.exists(self._key(name, salt))

    def put(self, prefix: NamedPrefix, salt: bytes) -> None:
        """Write the record of a prefix, and pin its blocks. Raises StoreError."""
        content = prefix.content if isinstance(prefix.content, str) else tuple(map(dict, prefix.content))
        root, keys = self.chain(prefix.tokens, salt)
        record = PrefixRecord(
            len(prefix.tokens),
            self.block_size,
            root.hex() if keys else "",
            b"".join(keys),
            name=prefix.name,
            version=prefix.version,
            kind=prefix.kind,
            content=content,
            created=prefix.created,
            model=self._model_name,
            last_key=keys[-1].hex() if keys else "",
        )
        self._records.put(self._key(prefix.name, salt), record)
        self.pins.pin(root, keys)

    def remove(self, name: str, salt: bytes) -> None:
        """Delete the record. Raises StoreError: a record that stays would bring the prefix back."""
        if self._earlier:
            self._records.remove(self._key(name, salt, self._earlier))
        self._records.remove(self._key(name, salt))

    def pin_adopted(self, tokens: Sequence[int], salt: bytes) -> None:
        """Pin the blocks of a prefix whose record another instance has written, or an earlier process."""
        self.pins.pin(*self.chain(tokens, salt))

    def unpin(self, tokens: Sequence[int], salt: bytes) -> None:
        """Unpin the blocks of a prefix that no other kept one needs."""
        self.pins.unpin(self.tenant(salt), *self.chain(tokens, salt))
