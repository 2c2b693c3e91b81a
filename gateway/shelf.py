"""Where a run's state goes that is not needed now: a small database file in its folder, and dicts that lean on it.

It is a cache of the ledger, made anew at each start, so nothing in it must survive the process. The file comes into
being with the first row: until then a look costs nothing. Afterwards a look for what was never put, as for a new
prompt, mostly ends at a table in memory.

A row is added at the end of the file, where that costs least. It is found as in a hash table: a slot in memory has the
number of the last row whose key's hash falls there, and each row the number of the one before it. The slots never
become more, so from `CHAINED` rows on the file has an index of those that come later.
"""

from __future__ import annotations

import marshal
import secrets
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import combinations, islice
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog
from xxhash import xxh3_64_intdigest

from gateway.core.errors import StoreFault

log = structlog.get_logger("detgate.store")

CACHE_KIB = 1024
"""Memory for pages of the file."""

SLOTS = 1 << 20
"""Of eight bytes each: a row's number, and in the low `_MARK_BITS` the marks of all its keys."""

CHAINED = 4 * SLOTS
"""Rows that the slots lead to."""

_MARK_BITS = 24
_MARKS = tuple(sum(1 << bit for bit in bits) for bits in combinations(range(_MARK_BITS), 3))
"""A key has one of these. They tell most keys that were never put: of a million rows, all but one in a hundred."""

_ALL_MARKS = (1 << _MARK_BITS) - 1

_UNREADABLE = "State that had left memory cannot be read"

_ADD = "INSERT INTO row VALUES (?, ?, ?, ?)"
_ADD_LATE = """
    INSERT INTO row VALUES (?, 0, ?, ?) ON CONFLICT (key) WHERE number > {} DO UPDATE SET value = excluded.value
"""

Row = tuple[bytes, bytes]
K = TypeVar("K", bound=bytes | int | str)
V = TypeVar("V")


class Shelf:
    """Rows by key. Whoever puts a key again replaces its row."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._database: sqlite3.Connection | None = None
        self._full = False
        self._slots = memoryview(bytearray()).cast("Q")
        self._last = 0
        """The number of the last row."""
        self._seed = secrets.randbits(64)
        """Of the hash of keys: nobody can send many that share a slot."""
        self.close()

    @property
    def empty(self) -> bool:
        """Nothing was ever put."""
        return self._database is None

    def put(self, rows: Iterable[Row]) -> bool:
        """Keep rows. False: they cannot be kept, as on a full disk."""
        try:
            self._put(self._database or self._make(), dict(rows))
        except (sqlite3.Error, StoreFault) as error:
            if not self._full:
                log.error("state cannot leave memory", file=str(self._file), why=str(error))
            self._full = True
            return False
        self._full = False
        return True

    def get(self, key: bytes) -> bytes | None:
        """The row of a key. Raises `StoreFault`."""
        found = self._find(key)
        return None if found is None else found[1]

    def drop(self, key: bytes) -> None:
        """Keep a row no longer. Raises `StoreFault`."""
        found = self._find(key)
        if self._database is not None and found is not None:
            try:
                with self._database:
                    self._database.execute("UPDATE row SET value = NULL WHERE number = ?", (found[0],))
            except sqlite3.Error as error:
                raise StoreFault(f"{_UNREADABLE}: {error}.") from error

    def close(self) -> None:
        """Remove it all."""
        if self._database is not None:
            self._database.close()
            self._database = None
            self._slots = memoryview(bytearray()).cast("Q")
            self._last = 0
        with suppress(OSError):
            self._file.unlink(missing_ok=True)

    def _put(self, database: sqlite3.Connection, rows: dict[bytes, bytes]) -> None:
        slots, seed, last, written = self._slots, self._seed, self._last, 0
        chained: list[tuple[int, int, bytes, bytes]] = []
        late: list[tuple[int, bytes, bytes]] = []
        known: list[tuple[bytes, int]] = []
        try:
            with database:
                for key, value in rows.items():
                    hashed = xxh3_64_intdigest(key, seed)
                    slot, mark = hashed % SLOTS, _MARKS[(hashed >> 32) % len(_MARKS)]
                    head = slots[slot]
                    if head & mark == mark:
                        database.executemany(_ADD, chained[written:])  # one of them may be the first that is read
                        written = len(chained)
                        if (found := self._find(key)) is not None:
                            known.append((value, found[0]))
                            continue
                    last += 1
                    if last > CHAINED:
                        late.append((last, key, value))
                    else:
                        chained.append((last, head >> _MARK_BITS, key, value))
                        slots[slot] = last << _MARK_BITS | head & _ALL_MARKS | mark
                database.executemany(_ADD, chained[written:])
                database.executemany(_ADD_LATE.format(CHAINED), late)
                database.executemany("UPDATE row SET value = ? WHERE number = ?", known)
        except BaseException:
            for _, before, key, _ in reversed(chained):
                slot = xxh3_64_intdigest(key, seed) % SLOTS
                slots[slot] = before << _MARK_BITS | slots[slot] & _ALL_MARKS
            raise
        self._last = last

    def _find(self, key: bytes) -> tuple[int, bytes | None] | None:
        """The number of a key's row, and the row, None if it was dropped. Raises `StoreFault`."""
        database = self._database
        if database is None:
            return None
        hashed = xxh3_64_intdigest(key, self._seed)
        head, mark = self._slots[hashed % SLOTS], _MARKS[(hashed >> 32) % len(_MARKS)]
        try:
            number = head >> _MARK_BITS if head & mark == mark else 0
            while number:
                row = database.execute("SELECT key, value, before FROM row WHERE number = ?", (number,)).fetchone()
                if row is None:
                    raise StoreFault(f"{_UNREADABLE}: a row is missing.")
                if row[0] == key:
                    return number, row[1]
                number = row[2]
            if self._last <= CHAINED:
                return None
            late = f"SELECT number, value FROM row WHERE key = ? AND number > {CHAINED}"
            found: tuple[int, bytes | None] | None = database.execute(late, (key,)).fetchone()
        except sqlite3.Error as error:
            raise StoreFault(f"{_UNREADABLE}: {error}.") from error
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
        database.execute(
            "CREATE TABLE IF NOT EXISTS row (number INTEGER PRIMARY KEY, before INTEGER, key BLOB, value BLOB)"
        )
        database.execute(f"CREATE UNIQUE INDEX IF NOT EXISTS late ON row (key) WHERE number > {CHAINED}")
        self._slots = memoryview(mmap(-1, 8 * SLOTS, access=ACCESS_COPY)).cast("Q")
        self._database = database
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
        self.shelf.drop(self._row(key))
        super().__delitem__(key)

    def rows(self) -> list[Row]:
        """What is in memory, as the shelf keeps it."""
        return self._first(len(self))

    def shed(self, keep: int) -> None:
        """Put all but the last `keep` away, if the shelf takes them."""
        if len(self) <= keep:
            return
        away = len(self) - keep
        if self.shelf.put(self._first(away)):
            for key in list(islice(self, away)):
                super().__delitem__(key)

    def _first(self, count: int) -> list[Row]:
        return [(self._row(key), marshal.dumps(self._pack(value))) for key, value in islice(self.items(), count)]

    def _row(self, key: K) -> bytes:
        if isinstance(key, int):
            return self._prefix + key.to_bytes(8, "big")
        return self._prefix + (key.encode() if isinstance(key, str) else key)
