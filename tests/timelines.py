"""What happens to indices, told as timelines: one table for the rule itself and for every store.

A line is `who  does what  what comes of it`, its columns two spaces apart:

    asks x [words]  claims an index for the bytes `x`. `x.2` is the same content in other bytes. Words:
                    `strict`, `content` (the order), `#3` (X-Request-Index), `key=K`, `again` or `again:2`
                    (the SDK's first or second retry), `as name` (identity), `in name` (session).
                    Comes of it: the index and what the answer says, a conflict's code, or `waits`.
    gets            what a waiting request was given, by the changes in the lines before.
    waits on        it was given nothing.
    gives up        its time is over. Comes of it: as of `asks`.
    leaves          the client of a waiting request goes.
    ends            the engine's answer has ended. Comes of it: `raced`, or nothing.
    delivers        the answer, or bytes of it, reached the client. Ends first, if it has not.
    fails           nothing reached the client. Ends first, if it has not. Comes of it: `released` or nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import cast

from gateway.core.errors import Conflict
from gateway.core.indexing import Ask, Claim, Kind
from gateway.stores import ScopeKey


@dataclass(frozen=True, slots=True)
class Step:
    """One line. `scope` and `ask` belong to `asks`."""

    line: str
    who: str
    verb: str
    outcome: str
    scope: ScopeKey
    ask: Ask


def steps(text: str) -> list[Step]:
    """Read a timeline."""
    return [_step(line.strip()) for line in text.strip().splitlines()]


def _step(line: str) -> Step:
    who, text = line.split(maxsplit=1)
    deed, *outcome = re.split(r"\s{2,}", text)
    verb, _, rest = deed.partition(" ")
    if verb != "asks":
        verb, rest = deed, "-"
    raw, *words = rest.split()
    content = raw.partition(".")[0]
    given = dict(word.partition("=")[::2] for word in words if "=" in word)
    number = next((int(word[1:]) for word in words if word[0] == "#"), None)
    again = next((word for word in words if word.startswith("again")), None)
    kind = "client" if number is not None else "content" if "content" in words else "arrival"
    identity = _after(words, "as") or "me"
    return Step(
        line,
        who,
        verb,
        outcome[0] if outcome else "",
        ScopeKey(
            "run",
            _after(words, "in") or "session",
            f"{identity}/{content}" if kind == "content" else identity,
        ),
        Ask(
            cast(Kind, kind),
            raw.encode(),
            content,
            number,
            given.get("key"),
            0 if again is None else int(again.partition(":")[2] or 1),
            "strict" in words,
        ),
    )


def _after(words: list[str], word: str) -> str | None:
    return words[words.index(word) + 1] if word in words else None


def told(outcome: Claim | Conflict) -> str:
    """A claim or a conflict as the tables write it."""
    if isinstance(outcome, Conflict):
        return outcome.code
    return " ".join((str(outcome.index), *(("reused",) if outcome.reused else ()), *sorted(outcome.flags)))


TIMELINES = {
    # --- orders
    "arrival order counts up": """
        a  asks x  0
        a  delivers
        b  asks y  1
        b  delivers
        c  asks x  2
        c  delivers
    """,
    "each identity has a counter of its own": """
        a  asks x as one  0
        b  asks y as two  0
        a  delivers
        b  delivers
        c  asks y as one  1
    """,
    "each session has a counter of its own": """
        a  asks x in one  0
        b  asks y in two  0
    """,
    "content order counts equal contents, whatever their bytes": """
        a  asks x content    0
        b  asks y content    0
        c  asks x.2 content  1
        d  asks x content    2
        e  asks y content    1
    """,
    "content order never races and never waits": """
        a  asks x content strict    0
        b  asks x.2 content strict  1
        c  asks y content strict    0
        a  ends
        b  ends
        c  ends
    """,
    "the client's number is taken as it is": """
        a  asks x #7  7
        a  delivers
        b  asks y #2  2
        b  delivers
        c  asks z #0  0
    """,
    "numbers never race and never wait": """
        a  asks x #0 strict  0
        b  asks y #1 strict  1
        c  asks z #2 strict  2
        a  ends
        b  ends
        c  ends
    """,
    "the first request fixes arrival order": """
        a  asks x     0
        a  delivers
        b  asks y #1  mixed_order
        c  asks z     1
    """,
    "the first request fixes the client's numbers": """
        a  asks x #5  5
        a  delivers
        b  asks y     mixed_order
        c  asks y #6  6
    """,
    "a first request that failed has fixed the order all the same": """
        a  asks x     0
        a  fails      released
        b  asks y #0  mixed_order
    """,
    "content order goes beside either": """
        a  asks x          0
        b  asks y content  0
        c  asks x #0 in other       0
        d  asks y content in other  0
    """,
    # --- racing
    "two that are in flight together raced": """
        a  asks x  0
        b  asks y  1 racing
        a  ends    raced
        b  ends    raced
    """,
    "of three, all raced": """
        a  asks x  0
        b  asks y  1 racing
        c  asks z  2 racing
        c  ends    raced
        b  ends    raced
        a  ends    raced
    """,
    "an answer that has ended races no more, delivered or not": """
        a  asks x  0
        a  ends
        b  asks y  1
        b  ends
        a  delivers
        b  delivers
    """,
    "equal bytes are interchangeable and do not race": """
        a  asks x  0
        b  asks x  1
        a  ends
        c  asks x  2
        b  ends
        c  ends
    """,
    "equal content in other bytes races": """
        a  asks x    0
        b  asks x.2  1 racing
        a  ends      raced
    """,
    "one that differs races with each of the equal ones": """
        a  asks x  0
        b  asks x  1
        c  asks y  2 racing
        a  ends    raced
        b  ends    raced
        c  ends    raced
    """,
    "an equal one that comes after the race has raced too, while the rival is in flight": """
        a  asks x  0
        b  asks y  1 racing
        c  asks x  2 racing
        b  ends    raced
        d  asks x  3
        a  ends    raced
        d  ends
    """,
    "a race does not stick to the session": """
        a  asks x  0
        b  asks y  1 racing
        a  delivers
        b  delivers
        c  asks z  2
        c  ends
    """,
    "an index taken again was not drawn, so it races with none": """
        a  asks x        0
        a  fails         released
        b  asks y        1
        a' asks x again  0 reused
        b  ends
        a' ends
    """,
    "a request is in flight until the last of its attempts has ended": """
        a  asks x        0
        r  asks x again  waits
        r  gives up      0 reused retry-shared
        a  ends
        b  asks y        1 racing
        r  ends          raced
        c  asks y        2
    """,
    "an index that raced has raced for whoever takes it again": """
        a   asks x        0
        b   asks y key=K  1 racing
        a   fails         released
        b   fails         released
        a'  asks x again  0 reused racing
        a'  ends          raced
        a'  delivers
        a2  asks x again:2  0 reused racing retry-shared
        b'  asks y key=K  1 reused racing
        c   asks z        2
    """,
    "a repeat with no index to repeat draws one, and races": """
        a  asks x        0
        b  asks y again  1 racing retry-unmatched
        a  ends          raced
    """,
    "a key that repeats races with none": """
        a  asks x key=K  0
        a  delivers
        b  asks y        1
        c  asks x key=K  0 reused
        b  ends
    """,
    "a first key races like any other": """
        a  asks x key=K  0
        b  asks y key=L  1 racing
        a  ends          raced
    """,
    # --- strict
    "strict: the second waits until the first has ended": """
        a  asks x strict  0
        b  asks y strict  waits
        a  ends           raced
        b  gets           1 racing
        b  ends           raced
        a  delivers
        b  delivers
        c  asks z strict  2
    """,
    "strict: refused when the wait was in vain, and nothing was taken": """
        a  asks x strict  0
        b  asks y strict  waits
        b  gives up       racing_index
        a  delivers
        c  asks z strict  1
    """,
    "strict: who waits gets its turn in order of arrival": """
        a  asks w strict  0
        b  asks x strict  waits
        c  asks y strict  waits
        d  asks z strict  waits
        a  ends           raced
        b  gets           1 racing
        c  waits on
        d  waits on
        b  ends           raced
        c  gets           2 racing
        d  waits on
        c  ends           raced
        d  gets           3 racing
    """,
    "strict: equal bytes need not wait": """
        a  asks x strict  0
        b  asks x strict  1
        c  asks y strict  waits
        a  ends           raced
        c  waits on
        b  ends           raced
        c  gets           2 racing
    """,
    "strict: equal bytes that come while another waits have raced with it": """
        a  asks x strict  0
        b  asks y strict  waits
        c  asks x strict  1 racing
        b  gives up       racing_index
        a  ends           raced
        c  ends           raced
        d  asks z strict  2
        d  ends
    """,
    "strict: who waited for its like and is refused for another's sake has raced with that": """
        a  asks x strict        0
        b  asks x strict        1
        a  fails                released
        b  fails                released
        a2 asks x strict        0 reused
        b2 asks x strict        1 reused
        r  asks x again strict  waits
        c  asks y strict        2
        r  gives up             racing_index
        c  ends                 raced
        a2 ends
    """,
    "strict: equal ones that wait go together": """
        a  asks x strict  0
        b  asks y strict  waits
        c  asks y strict  waits
        a  ends           raced
        b  gets           1 racing
        c  gets           2 racing
    """,
    "strict: who leaves while it waits takes nothing": """
        a  asks x strict  0
        b  asks y strict  waits
        c  asks z strict  waits
        b  leaves
        a  ends           raced
        c  gets           1 racing
    """,
    "strict: keys, numbers and releases do not wait": """
        a  asks x strict        0
        a  fails                released
        k  asks y key=K strict  1
        k  delivers
        b  asks z strict        2
        a' asks x again strict  0 reused
        k' asks y key=K strict  1 reused
        n  asks y #0 strict in other  0
        m  asks z #1 strict in other  1
    """,
    "strict: who waits takes what was released to its bytes meanwhile, and has not raced": """
        a  asks x strict  0
        a  ends
        b  asks y strict  1
        c  asks x strict  waits
        a  fails          released
        c  gets           0 reused
    """,
    "strict: a repeat that matches nothing waits for rivals too": """
        a  asks x strict        0
        b  asks x strict        1
        r  asks x again strict  waits
        c  asks y strict        waits
        a  ends                 raced
        b  ends                 raced
        c  gets                 2 racing
        a  delivers
        b  delivers
        r  waits on
        c  ends                 raced
        r  gets                 3 racing retry-unmatched
    """,
    "strict: a repeat of who waited for a rival shares its index": """
        a   asks x strict        0
        b   asks y strict        waits
        a   delivers
        b   gets                 1 racing
        b   delivers
        b'  asks y again strict  1 reused racing retry-shared
    """,
    "strict: a repeat of who waited in vain takes its first index": """
        a   asks x strict        0
        b   asks y strict        waits
        b   leaves
        a   delivers
        b'  asks y again strict  1
        b'  delivers
        b2  asks y again:2 strict  1 reused retry-shared
    """,
    "strict: a repeat that comes while the first still waits is one with it": """
        a   asks x strict        0
        b   asks y strict        waits
        b'  asks y again strict  waits
        a   delivers
        b   gets                 1 racing
        b'  waits on
        b   delivers
        b'  gets                 1 reused racing retry-shared
    """,
    "strict: of a repeat that was seen first, and waited, later ones are repeats": """
        a   asks x strict        0
        b'  asks y again strict  waits
        b'  gives up             racing_index
        b2  asks y again:2 strict  waits
        a   delivers
        b2  gets                 1 racing retry-unmatched
        b2  delivers
        b3  asks y again:3 strict  1 reused racing retry-shared
    """,
    "no clone: of two that waited each has its own, and a repeat neither's": """
        a   asks x strict        0
        b   asks y strict        waits
        c   asks y strict        waits
        a   delivers
        b   gets                 1 racing
        c   gets                 2 racing
        b   delivers
        c   delivers
        b'  asks y again strict  3 retry-unmatched
    """,
    "strict: a refused request binds no key": """
        a  asks x strict        0
        b  asks y key=K strict  waits
        b  gives up             racing_index
        a  delivers
        c  asks z strict        1
        c  delivers
        d  asks w key=K strict  2
    """,
    # --- releases
    "an undelivered index goes to its bytes and to no others": """
        a  asks x    0
        a  fails     released
        b  asks y    1
        b  delivers
        c  asks x.2  2
        c  delivers
        d  asks x    0 reused
        d  delivers
        e  asks x    3
    """,
    "the smallest released index is taken first": """
        a  asks x  0
        b  asks x  1
        c  asks x  2
        c  fails   released
        a  fails   released
        b  fails   released
        d  asks x  0 reused
        e  asks x  1 reused
        f  asks x  2 reused
        g  asks x  3
    """,
    "a delivered index is used: asking again is a new sample": """
        a  asks x    0
        a  delivers
        b  asks x    1
    """,
    "an index is released each time that its answer fails": """
        a  asks x  0
        a  fails   released
        b  asks x  0 reused
        b  fails   released
        c  asks x  0 reused
        c  delivers
        d  asks x  1
    """,
    "it is released when the last of its claims has ended": """
        a   asks x        0
        a'  asks x again  waits
        a'  gives up      0 reused retry-shared
        a   fails
        b   asks x        1
        a'  fails         released
        c   asks x        0 reused
    """,
    "one delivered of its claims uses it: the first": """
        a   asks x        0
        a'  asks x again  waits
        a'  gives up      0 reused retry-shared
        a   delivers
        a'  fails
        b   asks x        1
    """,
    "one delivered of its claims uses it: the last": """
        a   asks x        0
        a'  asks x again  waits
        a'  gives up      0 reused retry-shared
        a   fails
        a'  delivers
        b   asks x        1
    """,
    "three attempts of one index, the one in the middle delivered": """
        a    asks x          0
        a'   asks x again    waits
        a'   gives up        0 reused retry-shared
        a''  asks x again:2  waits
        a''  gives up        0 reused retry-shared
        a    fails
        a'   delivers
        a''  fails
        b    asks x          1
    """,
    "three attempts of one index, none delivered": """
        a    asks x          0
        a'   asks x again    waits
        a'   gives up        0 reused retry-shared
        a''  asks x again:2  waits
        a''  gives up        0 reused retry-shared
        a''  fails
        a    fails
        a'   fails           released
        a3   asks x again:3  0 reused
        a3   fails           released
        a4   asks x again:4  0 reused
        b    asks x          1
    """,
    "released once, it is taken once": """
        a  asks x        0
        a  fails         released
        b  asks x again  0 reused
        c  asks x        1
    """,
    # --- repeats
    "a repeat takes the smallest released index of its bytes": """
        a   asks x        0
        b   asks x        1
        b   fails         released
        a   fails         released
        r   asks x again  0 reused
        s   asks x again  1 reused
    """,
    "a repeat waits for the release, and gets it": """
        a   asks x        0
        a'  asks x again  waits
        a   ends
        a'  waits on
        a   fails         released
        a'  gets          0 reused
    """,
    "repeats that wait are served in order of arrival": """
        a   asks x        0
        b   asks x        1
        r   asks x again  waits
        s   asks x again  waits
        b   fails         released
        r   gets          1 reused
        s   waits on
        a   fails         released
        s   gets          0 reused
    """,
    "who asks anew does not get in before a repeat that waits": """
        a   asks x        0
        b   asks x        1
        r   asks x again  waits
        a   fails         released
        c   asks x        2
        r   gets          0 reused
    """,
    "a repeat that left takes nothing": """
        a   asks x        0
        r   asks x again  waits
        s   asks x again:2  waits
        r   leaves
        a   fails         released
        s   gets          0 reused
    """,
    "a repeat shares the one index of its bytes, once that was delivered": """
        a   asks x        0
        a'  asks x again  waits
        a   delivers
        a'  gets          0 reused retry-shared
        a'  delivers
        a2  asks x again:2  0 reused retry-shared
    """,
    "a repeat shares at once where nothing is live": """
        a   asks x        0
        a   delivers
        a'  asks x again  0 reused retry-shared
    """,
    "bytes that reached a client use the index, and a repeat shares it": """
        a   asks x        0
        a   delivers
        b   asks y        1
        b   delivers
        a'  asks x again  0 reused retry-shared
        a'  fails
        a2  asks x again:2  0 reused retry-shared
    """,
    "where several indices were issued, a repeat takes a new one": """
        a  asks x        0
        b  asks x        1
        a  delivers
        b  delivers
        r  asks x again  2 retry-unmatched
    """,
    "where several indices were issued, a repeat still waits for those in flight": """
        a  asks x        0
        b  asks x        1
        a  delivers
        r  asks x again  waits
        b  delivers
        r  gets          2 retry-unmatched
    """,
    "where several indices were issued, a repeat that gives up takes a new one": """
        a  asks x        0
        b  asks x        1
        r  asks x again  waits
        r  gives up      2 retry-unmatched
        a  fails         released
        b  delivers
        r  fails         released
        s  asks x again  0 reused
    """,
    "a repeat of what never arrived takes a new one": """
        r  asks x again    0 retry-unmatched
        r  delivers
        s  asks y          1
        s  delivers
        r2 asks x again:2  0 reused retry-shared
    """,
    "other bytes are no repeat": """
        a  asks x          0
        a  delivers
        r  asks x.2 again  1 retry-unmatched
    """,
    "repeats in content order": """
        a  asks x content        0
        a  fails                 released
        b  asks x.2 content      1
        a' asks x content again  0 reused
        b  delivers
        b' asks x.2 content again  1 reused retry-shared
    """,
    # --- no rule of repeats and releases makes a clone
    "no clone: an equal request took the index that a repeat comes back for": """
        a   asks x        0
        a   fails         released
        b   asks x        0 reused
        a'  asks x again  waits
        b   delivers
        a'  gets          1 retry-unmatched
    """,
    "no clone: a repeat gives up while an equal request has its index": """
        a   asks x        0
        a   fails         released
        b   asks x        0 reused
        a'  asks x again  waits
        a'  gives up      1 retry-unmatched
    """,
    "no clone: a retry that comes twice is of two requests": """
        a  asks x again  0 retry-unmatched
        b  asks x again  waits
        c  asks x again  waits
        a  delivers
        b  gets          1 retry-unmatched
        b  delivers
        c  gets          2 retry-unmatched
    """,
    "no clone: each of the same retries after a release": """
        a   asks x        0
        a   fails         released
        a'  asks x again  0 reused
        b'  asks x again  waits
        a'  delivers
        b'  gets          1 retry-unmatched
    """,
    "no clone: what waited in vain has asked too": """
        a   asks x strict  0
        a   delivers
        b   asks y strict  1
        c   asks x strict  waits
        c   leaves
        b   delivers
        c'  asks x again strict  2 retry-unmatched
    """,
    "no clone: what was refused has asked too, though it was the first": """
        b   asks y strict  0
        c   asks x strict  waits
        c   gives up       racing_index
        b   delivers
        d   asks x strict  1
        d   delivers
        c'  asks x again strict  2 retry-unmatched
    """,
    "no clone: a keyed index is not shared by its bytes": """
        a   asks x key=K  0
        a   delivers
        r   asks x again  1 retry-unmatched
    """,
    "no clone: a keyed index is not released to its bytes": """
        a   asks x key=K        0
        a   fails               released
        b   asks x              1
        b   delivers
        r   asks x again        1 reused retry-shared
        a'  asks x key=K again  0 reused
    """,
    "no clone: a key does not take what was released to bytes": """
        a   asks x        0
        a   fails         released
        k   asks x key=K  1
        k   fails         released
        a'  asks x again  0 reused
        k'  asks x key=K  1 reused
    """,
    # --- idempotency keys
    "a key is bound to its index for good": """
        a  asks x key=K        0
        a  delivers
        b  asks y              1
        b  delivers
        c  asks x key=K        0 reused
        c  fails
        d  asks x key=K again  0 reused
        d  delivers
        e  asks z              2
    """,
    "a key in flight is shared at once, without a wait": """
        a  asks x key=K        0
        b  asks x key=K again  0 reused
        a  fails
        b  fails               released
        c  asks x key=K        0 reused
    """,
    "a key whose first sending got lost": """
        a  asks x key=K again  0
        a  fails               released
        b  asks x key=K again:2  0 reused
    """,
    "an index that failed with a key waits for that key alone": """
        a  asks x key=K  0
        a  fails         released
        b  asks x        1
        b  delivers
        c  asks x key=L  2
        c  delivers
        d  asks x key=K  0 reused
        d  delivers
        e  asks x key=K  0 reused
    """,
    "a key with other content": """
        a  asks x key=K  0
        b  asks y key=K  idempotency_conflict
        a  fails         released
        c  asks y key=K  idempotency_conflict
        d  asks y        1
    """,
    "a key binds to content, not to bytes": """
        a  asks x key=K    0
        a  delivers
        b  asks x.2 key=K  0 reused
    """,
    "a key holds in the whole session": """
        a  asks x key=K as one  0
        b  asks x key=K as two  idempotency_conflict
        c  asks x key=K as two in other  0
    """,
    "a key in content order": """
        a  asks x key=K content    0
        b  asks x content          1
        c  asks x.2 key=K content  0 reused
        d  asks y key=K content    idempotency_conflict
    """,
    "keys in flight with equal bytes": """
        a  asks x key=K  0
        b  asks x key=L  1
        b  fails         released
        a  fails         released
        d  asks x key=L  1 reused
        c  asks x key=K  0 reused
        c  ends
    """,
    # --- numbers
    "a number of other content, in flight": """
        a  asks x #3  3
        b  asks y #3  index_conflict
    """,
    "a number of other content, delivered": """
        a  asks x #3  3
        a  delivers
        b  asks y #3  index_conflict
        c  asks y #4  4
    """,
    "a number asked again is the same request, in any bytes": """
        a  asks x #3          3
        b  asks x.2 #3        3 reused
        a  delivers
        b  fails
        c  asks x #3 again    3 reused
        c  fails
        d  asks y #3          index_conflict
        e  asks x #3          3 reused
    """,
    "a released number is taken again by its number": """
        a  asks x #3  3
        a  fails      released
        b  asks x #4  4
        c  asks x #3  3 reused
    """,
    "a released number may go to other content, and then is that content's": """
        a  asks x #3        3
        a  fails            released
        b  asks y #3        3 reused
        a' asks x #3 again  index_conflict
        b  delivers
        a2 asks x #3 again:2  index_conflict
    """,
    "a number with two claims is released by the last": """
        a  asks x #3  3
        b  asks x #3  3 reused
        a  fails
        c  asks y #3  index_conflict
        b  fails      released
        d  asks y #3  3 reused
    """,
    "a number with a key is released to the key: no other content gets it": """
        a  asks x #3 key=K  3
        a  fails            released
        b  asks y #3        index_conflict
        c  asks x #3 key=K  3 reused
    """,
    "a number with a key may be asked without it, and stays the key's": """
        a  asks x #3 key=K  3
        a  fails            released
        b  asks x #3        3 reused
        b  fails            released
        c  asks y #3        index_conflict
        d  asks x #3 key=K  3 reused
    """,
    "a key and another number": """
        a  asks x #3 key=K  3
        a  delivers
        b  asks x #4 key=K  idempotency_conflict
        c  asks y #3 key=K  idempotency_conflict
    """,
    "two keys of one number are one request": """
        a  asks x #3 key=K  3
        b  asks x #3 key=L  3 reused
        a  delivers
        b  delivers
        c  asks x #3 key=K  3 reused
        c  fails
        d  asks y #3        index_conflict
        e  asks x #3 key=L  3 reused
    """,
    "a number may get its key later": """
        a  asks x #3        3
        a  delivers
        b  asks x #3 key=K  3 reused
        b  fails
        c  asks y #3        index_conflict
        d  asks y #3 key=K  idempotency_conflict
    """,
    "a conflict takes nothing": """
        a  asks x #3 key=K  3
        b  asks y #3 key=L  index_conflict
        c  asks z #5 key=L  5
    """,
}
