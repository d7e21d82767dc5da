"""Defects that tests must catch. Each is a change of one place; the text before must occur exactly once in the file.

`connectors.py` has those that claims of `foreword conform` must catch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A planted defect.

    Attributes:
        tests: arguments of pytest, one of which must fail.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def planted(self, source: str) -> str:
        """The file with the defect, given its text. Raises ValueError unless the text before occurs exactly once in it."""
        if (places := source.count(self.before)) != 1:
            raise ValueError(f"does not apply: {places} places in {self.file}")
        return source.replace(self.before, self.after)


KEYS = ("tests/blocks/test_keys.py",)
RESUME = ("tests/blocks/test_resume.py",)
IDENTITY = ("tests/integrations/test_vllm_identity.py",)
FRAME = ("tests/store/test_frame.py",)
MEMORY = ("tests/store/test_memory.py", "tests/store/test_contract_machine.py")
TIERED = ("tests/store/test_tiered.py",)
DISK = ("tests/store/test_disk.py", "tests/store/test_disk_faults.py")
ENCRYPTION = ("tests/store/test_encryption.py",)
EVICTIONS = ("tests/store/test_evictions.py",)
SOUND = ("tests/store/test_sound_blocks_stay.py",)
ERASURE = ("tests/store/test_erasure_faults.py",)
LEASES = ("tests/engine/test_lease_contract.py",)
RECORDS = ("tests/store/test_shared_records.py",)
OFFLOAD = ("tests/test_offload.py", "tests/engine/test_stores.py")

_SCOPE = "given = (self.model, *self.salt) if self.salt.client else (self.model, self.salt.tenant)"
_CHAIN = "parent = sha256(parent + data[start : start + width]).digest()"

MUTANTS = (
    # Deletions, erasures and retentions that outlive what asked for them
    Mutant(
        "offload: a queued deletion removes blocks that were saved again",
        "foreword/offload/manager.py",
        "                    self._unsaved.pop(key, None)\n",
        "                    pass\n",
        ("tests/test_offload.py",),
    ),
    Mutant(
        "tiers: a forked child waits for a late read of its parent",
        "foreword/store/tier_threads.py",
        "        self.filling = Filling()\n",
        '        self.filling: Filling = getattr(self, "filling", None) or Filling()\n',
        ("tests/test_offload.py",),
    ),
    Mutant(
        "disk: pieces that an erasure has changed are not synced",
        "foreword/store/disk/synced.py",
        "                    yield from paths\n",
        "                    pass\n",
        ("tests/store/test_erasure.py",),
    ),
    Mutant(
        "retentions: an adopted one is pinned once, at its use",
        "foreword/prefixes/lease_follower.py",
        "            self._coming[key] = _COMING",
        "            self._coming[key] = 1",
        LEASES,
    ),
    # Lookups: one outcome each
    Mutant(
        "placement: nothing is charged for what others wait",
        "foreword/routing/placement.py",
        "return self.behind * self.prefill",
        "return 0.0",
        ("tests/routing/test_placement.py",),
    ),
    Mutant(
        "lookups: a result that comes too late counts again",
        "foreword/offload/lookups.py",
        """            if self._ended:
                return
""",
        "",
        ("tests/test_lookups.py",),
    ),
    Mutant(
        "lookups: no tier counts what it could not be asked",
        "foreword/store/tier.py",
        "else missed\n        with self._threads.lock:\n            self.counters.lookups[outcome] += 1",
        "else missed\n        with self._threads.lock:\n"
        "            self.counters.lookups[outcome] += outcome is not LookupOutcome.TIER_OFF",
        ("tests/test_lookups.py",),
    ),
    Mutant(
        "lookups: remote tiers take the time of local ones",
        "foreword/store/tiered.py",
        "self._left = {True: local, False: remote}",
        "self._left = {True: min(local, remote), False: remote}",
        ("tests/test_lookups.py",),
    ),
    Mutant(
        "tier: a full store is switched off",
        "foreword/store/tier.py",
        "except (StoreFull, StoreReadOnly) as error:",
        "except StoreReadOnly as error:",
        ("tests/test_lookups.py",),
    ),
    # Keys: what KV depends on
    Mutant(
        "keys: salt of a request ignored",
        "foreword/integrations/vllm/request_identity.py",
        "return Salt.parse(request.cache_salt)",
        "return Salt.parse(None)",
        IDENTITY,
    ),
    Mutant(
        "keys: adapter ignored",
        "foreword/integrations/vllm/request_identity.py",
        "return RequestIdentity(adapter, salt) if adapter else _PLAIN",
        "return _PLAIN",
        IDENTITY,
    ),
    Mutant(
        "keys: adapter's configuration not in its digest",
        "foreword/integrations/adapter_files.py",
        'return sorted([*weights, folder / "adapter_config.json"])',
        "return sorted(weights)",
        IDENTITY,
    ),
    Mutant(
        "keys: place of an image ignored",
        "foreword/integrations/vllm_extras/media.py",
        "item.offset - block * block_size)",
        "0)",
        IDENTITY,
    ),
    Mutant(
        "keys: weights version trusted though KV was computed before it",
        "foreword/integrations/vllm/weights.py",
        "if empty or (empty is None and not self.computed):",
        "if True:",
        IDENTITY,
    ),
    Mutant(
        "keys: an adapter that changed on disk still loads",
        "foreword/integrations/vllm_extras/adapters.py",
        "return digest == adapter.digest and self._by_path.get(path) == digest",
        "return True",
        IDENTITY,
    ),
    Mutant(
        "keys: model not in the scope", "foreword/blocks/keys.py", _SCOPE, _SCOPE.replace("self.model", 'b""'), KEYS
    ),
    Mutant(
        "keys: a client's salt not in the scope",
        "foreword/blocks/keys.py",
        _SCOPE,
        "given = (self.model, self.salt.tenant)",
        KEYS,
    ),
    Mutant(
        "keys: a client names its tenant",
        "foreword/blocks/salt.py",
        'return cls.of(b"", cache_salt)',
        'return cls((cache_salt or "").encode())',
        (*KEYS, *IDENTITY),
    ),
    Mutant(
        "fair shares: each salt of a client is a tenant",
        "foreword/blocks/layout.py",
        "FINGERPRINT_BYTES + TENANT_BYTES]",
        "FINGERPRINT_BYTES + 16]",
        ("tests/store/test_tier_quotas.py",),
    ),
    Mutant(
        "keys: block size not in the scope",
        "foreword/blocks/keys.py",
        '"<II", KEY_FORMAT, self.block_size)',
        '"<II", KEY_FORMAT, 0)',
        KEYS,
    ),
    Mutant(
        "keys: parent not in the key", "foreword/blocks/keys.py", _CHAIN, _CHAIN.replace("parent + data", "data"), KEYS
    ),
    Mutant("keys: extras ignored", "foreword/blocks/keys.py", "+ width] + extra).digest()", "+ width]).digest()", KEYS),
    Mutant(
        "keys: a chain that grows starts at its root again",
        "foreword/blocks/keys.py",
        "parent = self.keys[-1] if known > self.public else self._behind",
        "parent = self._behind",
        KEYS,
    ),
    Mutant(
        "keys: what a tenant has behind a public prefix is everybody's",
        "foreword/blocks/keys.py",
        "parent = self.keys[-1] if known > self.public else self._behind",
        "parent = self.keys[-1] if known else self._behind",
        ("tests/blocks/test_public.py",),
    ),
    # Positions
    Mutant(
        "resume: window one block too short",
        "foreword/blocks/resume.py",
        "return max(position - self.span + 1, 0)",
        "return max(position - self.span + 1 + self.block_size, 0)",
        RESUME,
    ),
    Mutant(
        "resume: recurrent state one block off",
        "foreword/blocks/resume.py",
        "iter(range(stop - 1, max(stop - 2, -1), -1))",
        "iter(range(stop - 2, max(stop - 3, -1), -1))",
        RESUME,
    ),
    Mutant(
        "resume: one block more than there is",
        "foreword/blocks/resume.py",
        "position = min(position, run * group.block_size // step * step)",
        "position = min(position, (run + 1) * group.block_size // step * step)",
        RESUME,
    ),
    Mutant(
        "resume: chunk's blocks not needed",
        "foreword/blocks/resume.py",
        "return position - position % self.span if",
        "return position if",
        RESUME,
    ),
    # Frames and stores
    Mutant(
        "frame: checksum not compared",
        "foreword/store/frame.py",
        "if not authenticated and _checksum(data[: header.length], data[header.length : end]) != data[end:]:",
        "if False:",
        FRAME,
    ),
    Mutant(
        "frame: header not in the checksum", "foreword/store/frame.py", "state.update(head)", 'state.update(b"")', FRAME
    ),
    Mutant(
        "frame: name not compared",
        "foreword/store/frame.py",
        "if name is not None and header.name != name:",
        "if False:",
        FRAME,
    ),
    Mutant(
        "frame: length not compared",
        "foreword/store/frame.py",
        "if len(data) != header.length + HEADER_BYTES:",
        "if False:",
        FRAME,
    ),
    Mutant(
        "tier: checksums not compared without signatures",
        "foreword/store/tier.py",
        "authenticated = self.store.authenticates",
        "authenticated = True",
        TIERED,
    ),
    Mutant(
        "tier: damaged block kept",
        "foreword/store/tier.py",
        "                self._delete_bad(bad, deadline)",
        "                pass",
        TIERED,
    ),
    # Deleting: only what is proven, and all of what a receipt says
    Mutant(
        "disk: what cannot be read is damaged",
        "foreword/store/disk/files.py",
        "    return UNREADABLE if error.errno in _UNREADABLE else FAILED",
        "    return BAD if error.errno in _UNREADABLE else FAILED",
        SOUND,
    ),
    Mutant(
        "tier: damage is not looked at twice",
        "foreword/store/tier.py",
        "            damaged = [name for name, one in zip(batch, outcomes, strict=True) if isinstance(one, str)]",
        "            damaged = batch",
        SOUND,
    ),
    Mutant(
        "tier: lookups hide reads that fail",
        "foreword/store/tier.py",
        "certain=self._unread >= _UNREAD_TO_OPEN",
        "certain=False",
        SOUND,
    ),
    Mutant(
        "integrity: an unknown key is damage",
        "foreword/store/frame.py",
        'FOREIGN_REASONS: Final = frozenset({"unknown_key", "version"})',
        'FOREIGN_REASONS: Final = frozenset({"version"})',
        SOUND,
    ),
    Mutant(
        "write queue: an erasure leaves what waits",
        "foreword/offload/writer.py",
        "            self._batches = [batch for batch in self._batches if batch not in idle]",
        "            idle = []",
        ("tests/test_offload.py",),
    ),
    Mutant(
        "write queue: what was erased is promoted",
        "foreword/offload/writer.py",
        "            if read is not None and batch.is_of(read.erased):",
        "            if False:",
        ("tests/test_offload.py",),
    ),
    Mutant(
        "write queue: what was erased during its save is written further",
        "foreword/offload/writer.py",
        "            if read is not None and batch.is_of(read.erased):",
        "            if read is not None and batch.promotion and batch.is_of(read.erased):",
        ("tests/test_direct_tier.py",),
    ),
    Mutant(
        "erasure: a place that failed is forgotten",
        "foreword/prefixes/erasure.py",
        "        if step.problem is not None:",
        "        if False:",
        ERASURE,
    ),
    Mutant(
        "erasure: a partial listing is a whole one",
        "foreword/prefixes/erasure.py",
        "            if problem is not None:",
        "            if False:",
        ERASURE,
    ),
    Mutant(
        "erasure: records of tenants stay",
        "foreword/prefixes/erasure.py",
        "                if record_tenant(key) and wanted(key):",
        "                if False:",
        RECORDS,
    ),
    Mutant(
        "records: encrypted with a key that outlives their tenant",
        "foreword/store/sealing.py",
        "    return bytes.fromhex(record_tenant(key))[:TENANT_BYTES] or SHARED",
        "    return SHARED",
        RECORDS,
    ),
    Mutant(
        "records: a damaged one is used",
        "foreword/store/shared_records.py",
        "checksum not in (None, checksum_of(fields)) or named",
        "named",
        RECORDS,
    ),
    Mutant(
        "records: a tier that does not answer has none",
        "foreword/store/tiered.py",
        "        if problem is not None:",
        "        if False:",
        RECORDS,
    ),
    Mutant(
        "records: what another instance renewed is deleted",
        "foreword/prefixes/lease_records.py",
        "    if found is not None and records.left(key, found) <= 0:",
        "    if found is not None:",
        RECORDS,
    ),
    Mutant(
        "records: one that was just written counts as removed",
        "foreword/store/shared_records.py",
        "FoundRecords({}, {}, set(self._written))",
        "FoundRecords({}, {}, set())",
        RECORDS,
    ),
    Mutant(
        "pins: what another prefix needs is unpinned",
        "foreword/prefixes/pins.py",
        "[key for key in own_keys(bytes.fromhex(tenant), wanted) if key not in shared]",
        "own_keys(bytes.fromhex(tenant), wanted)",
        ("tests/engine/test_stored_retentions.py",),
    ),
    Mutant(
        "pins: what another process keeps is unpinned",
        "foreword/prefixes/pins.py",
        "        others += self._recorded(tenant, others)\n",
        "",
        ("tests/engine/test_kept_prefixes.py",),
    ),
    Mutant(
        "leases: retentions ignore what names have",
        "foreword/blocks/leases.py",
        "min(self._retain_budget, self.free)",
        "self._retain_budget",
        ("tests/blocks/test_leases.py",),
    ),
    Mutant(
        "leases: a name that has ended keeps its blocks",
        "foreword/blocks/leases.py",
        "            if lease not in self._named:\n",
        "            if False:\n",
        ("tests/blocks/test_leases.py",),
    ),
    Mutant(
        "leases: a budget of bytes counts blocks",
        "foreword/blocks/leases.py",
        "        return min(self._retain_budget, self.free) // self.block_bytes\n",
        "        return min(self._retain_budget, self.free)\n",
        LEASES,
    ),
    Mutant(
        "leases: the end of one takes what another one has",
        "foreword/blocks/leases.py",
        "            if not counted[block]:\n",
        "            if True:\n",
        LEASES,
    ),
    Mutant(
        "leases: a use does not renew",
        "foreword/blocks/leases.py",
        "                    one.expires = max(one.expires, self._clock() + one.ttl)\n",
        "                    pass\n",
        LEASES,
    ),
    Mutant(
        "pins: blocks that are written later are not pinned",
        "foreword/prefixes/pins.py",
        "                self._pending[root, keys[-1]] = keys, self._tries\n",
        "                pass\n",
        LEASES,
    ),
    Mutant(
        "pins: what has ended is pinned when it is written",
        "foreword/prefixes/pins.py",
        "            self._pending.pop((root, keys[-1]), None)\n",
        "            pass\n",
        LEASES,
    ),
    Mutant(
        "tier: circuit breaker never opens",
        "foreword/store/tier_threads.py",
        "        if now < self._open_until:\n            return False",
        "        if False:\n            return False",
        TIERED,
    ),
    Mutant(
        "tier: a late read writes into the caller's buffer",
        "foreword/store/tier.py",
        "private = self.blocking and on_late is None",
        "private = False",
        TIERED,
    ),
    Mutant(
        "memory: lease of a reader ignored",
        "foreword/store/memory/memory_store.py",
        "            in_use[slot] += 1\n",
        "            in_use[slot] += 0\n",
        MEMORY,
    ),
    Mutant(
        "memory: frames with a gap between them are copied at once",
        "foreword/store/memory/memory_store.py",
        "or address != end",
        "or False",
        MEMORY,
    ),
    Mutant(
        "memory: pins ignored by eviction",
        "foreword/store/chain_lru.py",
        "if self._children[slot] or self.pinned[slot]:\n                heappop",
        "if self._children[slot]:\n                heappop",
        MEMORY,
    ),
    Mutant(
        "memory: parents evicted before their children",
        "foreword/store/chain_lru.py",
        "if self._children[slot] or self.pinned[slot]:\n                heappop",
        "if self.pinned[slot]:\n                heappop",
        MEMORY,
    ),
    Mutant(
        "disk: pins ignored by eviction",
        "foreword/store/disk/index_rows.py",
        "one.children = 1 AND one.pinned = 0",
        "one.children = 1",
        EVICTIONS,
    ),
    Mutant(
        "disk: a chain is evicted below the share of its tenant",
        "foreword/store/disk/index_rows.py",
        "            need = min(need, int(usage[tenant].amount - keep))",
        "            pass",
        EVICTIONS,
    ),
    Mutant(
        "disk: blocks above one that stays lose their files",
        "foreword/store/disk/writer.py",
        "transaction.touch([rows[gone].id], now)\n                    break",
        "transaction.touch([rows[gone].id], now)",
        EVICTIONS,
    ),
    Mutant(
        "disk: a hole reaches into the next block",
        "foreword/store/disk/pieces.py",
        "    return near[1] + _ENTRY.size, near[3], lows[2], size if found[3] is None else found[3].at",
        "    return near[1] + _ENTRY.size, near[3], lows[2], size if found[3] is None else found[3].at + found[3].length",
        EVICTIONS,
    ),
    Mutant(
        "disk: files written in place",
        "foreword/store/disk/files.py",
        'write_atomically(path, f"{path}.{token}", data)',
        "write_atomically(path, path, data)",
        DISK,
    ),
    Mutant(
        "store: signature not verified",
        "foreword/store/sealing.py",
        "        except self._keys.invalid_tag:\n            return False\n        set_key",
        "        except self._keys.invalid_tag:\n            pass\n        set_key",
        ("tests/store/test_integrity.py",),
    ),
    Mutant(
        "encryption: a tag that fails is ignored",
        "foreword/store/sealing.py",
        "            data[end : end + _CLEAR] = head\n            return False",
        "            data[end : end + _CLEAR] = head",
        ENCRYPTION,
    ),
    Mutant(
        "encryption: the checksum is in the clear",
        "foreword/store/sealing.py",
        "head, bytes(buffer[end : checksum + TAG_BYTES]))",
        "head, plain[:_CHECKSUM_BYTES] + bytes(buffer[checksum : checksum + TAG_BYTES]))",
        ENCRYPTION,
    ),
    Mutant(
        "encryption: a frame without a seal is read",
        "foreword/store/sealing.py",
        "        if not self._keys.read_plain:\n",
        "        if False:\n",
        ENCRYPTION,
    ),
    Mutant(
        "data keys: a key written during a destruction stays",
        "foreword/store/data_keys.py",
        "        if self._store.get(_path(tenant, _DESTROYED)) is not None:\n            self._store.delete",
        "        if False:\n            self._store.delete",
        ENCRYPTION,
    ),
    Mutant(
        "data keys: a key in memory is never looked for again",
        "foreword/store/data_keys.py",
        "        if entry is None or time.monotonic() >= entry.until:\n            entry = self._checked",
        "        if entry is None:\n            entry = self._checked",
        ENCRYPTION,
    ),
    Mutant(
        "data keys: keys are used for ever while the key store fails",
        "foreword/store/data_keys.py",
        "now < checked + self._config.outage_seconds",
        "True",
        ENCRYPTION,
    ),
    Mutant(
        "data keys: a tenant keeps its salt after its keys were destroyed",
        "foreword/store/data_keys.py",
        "        if first not in dead:\n            return base",
        "        if True:\n            return base",
        ENCRYPTION,
    ),
    # Between the device and the stores
    Mutant(
        "offload: copied and never queued",
        "foreword/offload/manager.py",
        "        self._writer.add([queued for _, _, queued in waiting])\n",
        "",
        OFFLOAD,
    ),
    Mutant(
        "offload: the copies of a step go into the slots of another group",
        "foreword/offload/manager.py",
        "for number, units, queued in waiting if number == group]",
        "for number, units, queued in waiting if number <= group]",
        OFFLOAD,
    ),
    Mutant(
        "offload: loaded into the next block",
        "foreword/offload/manager.py",
        "blocks = store_load.blocks[done + low : done + high]",
        "blocks = [*store_load.blocks[done + low + 1 : done + high], store_load.blocks[done + low]]",
        OFFLOAD,
    ),
    Mutant(
        "offload: a block that was not read counts as loaded",
        "foreword/offload/manager.py",
        "for one in itertools.takewhile(bool, found)",
        "for one in found",
        OFFLOAD,
    ),
    Mutant(
        "offload: lent frames are not verified",
        "foreword/store/tier.py",
        "_outcome(name, data, len(data), False)",
        "_outcome(name, data, len(data), True)",
        OFFLOAD,
    ),
    Mutant(
        "store: what is lent is evicted",
        "foreword/store/memory/memory_store.py",
        "            in_use[slot] += 1\n",
        "            in_use[slot] += 0\n",
        ("tests/store/test_memory.py",),
    ),
    # A router reads as its replicas do
    Mutant(
        "router: renders otherwise than a replica",
        "foreword/router/prompts.py",
        "self._messages.tokens(chat_text(self._tokenizer, request))",
        "self._messages.tokens(chat_text(self._tokenizer, request, ({'role': 'user', 'content': ''},)))",
        ("tests/serving/test_router_tokens.py",),
    ),
    Mutant(
        "router: a salt of a wrong type is left out",
        "foreword/api/dialects/foreign.py",
        '"prefix", "cache_salt", "priority"',
        '"prefix", "priority"',
        ("tests/serving/test_router_foreign.py",),
    ),
)
