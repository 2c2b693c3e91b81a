"""Where a run's state goes that is not needed now: a small database file in its folder, and dicts that lean on it.

It is a cache of the ledger, made anew at each start, so nothing in it must survive the process. The file comes into
being with the first row: until then a look costs nothing. Afterwards a look for what was never put, as for a new
prompt, mostly ends at a filter in memory.
"""

from __future__ import annotations

import marshal
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog
from xxhash import xxh3_128_intdigest

from gateway.core.errors import StoreFault

log = structlog.get_logger("detgate.store")

CACHE_KIB = 1024
"""Memory for pages of the file."""

FILTER_BYTES = 1 << 20
"""Of memory that tells most keys that were never put: of a million rows, all but two in a hundred."""

_SHIFTS = (0, 32, 64, 96)
"""Parts of a key's hash, each of which names one bit of the filter."""

Row = tuple[bytes, bytes]
K = TypeVar("K", bound=bytes | int | str)
V = TypeVar("V")


class Shelf:
    """Rows by key. Whoever puts a key again replaces its row."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._database: sqlite3.Connection | None = None
        self._full = False
        self._filter = bytearray()
        self.close()

    @property
    def empty(self) -> bool:
        """Nothing was ever put."""
        return self._database is None

    def put(self, rows: Iterable[Row]) -> bool:
        """Keep rows. False: they cannot be kept, as on a full disk."""
        try:
            database = self._database or self._make()
            rows = list(rows)
            with database:
                database.executemany("INSERT OR REPLACE INTO row VALUES (?, ?)", rows)
        except sqlite3.Error as error:
            if not self._full:
                log.error("state cannot leave memory", file=str(self._file), why=str(error))
            self._full = True
            return False
        self._full = False
        for key, _ in rows:
            self._mark(key)
        return True

    def get(self, key: bytes) -> bytes | None:
        """The row of a key. Raises `StoreFault`."""
        if self._database is None or not self._marked(key):
            return None
        found = self._ask("SELECT value FROM row WHERE key = ?", key)
        return None if found is None else bytes(found[0])

    def drop(self, key: bytes) -> None:
        """Keep a row no longer. Raises `StoreFault`."""
        self._ask("DELETE FROM row WHERE key = ?", key)

    def any(self, prefix: bytes) -> bool:
        """Whether a key begins so. Raises `StoreFault`."""
        return self._ask("SELECT 1 FROM row WHERE key >= ? AND key < ? LIMIT 1", prefix, prefix + b"\xff") is not None

    def close(self) -> None:
        """Remove it all."""
        if self._database is not None:
            self._database.close()
            self._database = None
            self._filter = bytearray()
        with suppress(OSError):
            self._file.unlink(missing_ok=True)

    def _mark(self, key: bytes) -> None:
        hashed = xxh3_128_intdigest(key)
        for shift in _SHIFTS:
            bit = (hashed >> shift) % (FILTER_BYTES * 8)
            self._filter[bit >> 3] |= 1 << (bit & 7)

    def _marked(self, key: bytes) -> bool:
        """Whether a key may have been put."""
        hashed = xxh3_128_intdigest(key)
        for shift in _SHIFTS:
            bit = (hashed >> shift) % (FILTER_BYTES * 8)
            if not self._filter[bit >> 3] >> (bit & 7) & 1:
                return False
        return True

    def _ask(self, query: str, *values: bytes) -> tuple[Any, ...] | None:
        if self._database is None:
            return None
        try:
            found: tuple[Any, ...] | None = self._database.execute(query, values).fetchone()
        except sqlite3.Error as error:
            raise StoreFault(f"State that had left memory cannot be read: {error}.") from error
        return found

    def _make(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._file, isolation_level="DEFERRED", check_same_thread=False)
        for pragma in (
            "journal_mode = MEMORY",
            "synchronous = OFF",
            "locking_mode = EXCLUSIVE",
            f"cache_size = -{CACHE_KIB}",
        ):
            database.execute(f"PRAGMA {pragma}")
        database.execute("CREATE TABLE IF NOT EXISTS row (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")
        self._database = database
        self._filter = bytearray(FILTER_BYTES)
        return database


class Entries(dict[K, V], Generic[K, V]):
    """A dict of which only a part is in memory. A value must be changed in the turn in which it was asked for.

    It cannot be iterated over whole. `pack` and `unpack` make a value to what `marshal` can write, and back.
    """

    __slots__ = ("_pack", "_prefix", "_unpack", "shelf")

    def __init__(
        self,
        shelf: Shelf,
        prefix: bytes,
        pack: Callable[[V], Any],
        unpack: Callable[[Any], V],
        known: Iterable[tuple[K, V]] = (),
    ) -> None:
        super().__init__(known)
        self.shelf = shelf
        self._prefix = prefix
        self._pack = pack
        self._unpack = unpack

    def __missing__(self, key: K) -> V:
        row = self.shelf.get(self._row(key))
        if row is None:
            raise KeyError(key)
        value = self[key] = self._unpack(marshal.loads(row))
        return value

    def get(self, key: K, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def setdefault(self, key: K, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            self[key] = default
            return default

    def __delitem__(self, key: K) -> None:
        super().__delitem__(key)
        self.shelf.drop(self._row(key))

    def rows(self) -> list[Row]:
        """What is in memory, as the shelf keeps it."""
        return [(self._row(key), marshal.dumps(self._pack(value))) for key, value in self.items()]

    def shed(self, keep: int) -> None:
        """Put all but the last `keep` away, if the shelf takes them."""
        if len(self) <= keep:
            return
        away = self.rows()[: len(self) - keep]
        if self.shelf.put(away):
            for key in list(self)[: len(away)]:
                super().__delitem__(key)

    def _row(self, key: K) -> bytes:
        if isinstance(key, int):
            return self._prefix + key.to_bytes(8, "big")
        return self._prefix + (key.encode() if isinstance(key, str) else key)
