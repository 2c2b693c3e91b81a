"""What the ledger tells of sessions, written and read."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

from gateway.core.identity import Known
from gateway.session import Group, Interaction, Session


def created_record(session: Session) -> dict[str, Any]:
    """The ledger's record of a session that is created."""
    known, group = session.known, session.group
    assert session.key is not None
    return {
        "event": "session",
        "time": time.time(),
        "run": known.run,
        "session": known.session,
        "identity": known.identity,
        "ordinal": known.ordinal,
        "index_order": known.order,
        "seed": known.seed,
        "submission": session.order,
        "group": known.group,
        "group_identity": None if group is None else group.identity,
        "group_size": None if group is None else group.size,
        "member": known.member,
        "failed_reward": session.failed_reward,
        "weights": "hold" if session.holds else "any",
        "key_digest": session.key.hex(),
    }


def ended_record(session: Session, why: str | None) -> dict[str, Any]:
    """The ledger's record of its end. `why`: it failed."""
    run, name = session.place
    reward = session.reward
    return {
        "event": "session_ended",
        "time": time.time(),
        "run": run,
        "session": name,
        "state": "ended" if why is None else "failed",
        "why": why,
        "session_reward": session.failed_reward if why is not None and reward is None else reward,
    }


def rewarded_record(session: Session, interaction: Interaction, reward: float, total: float) -> dict[str, Any]:
    """The ledger's record of a reward. `total`: what its session's rewards are now together."""
    run, name = session.place
    return {
        "event": "reward",
        "time": time.time(),
        "run": run,
        "session": name,
        "identity": interaction.identity,
        "index": interaction.index,
        "reward": reward,
        "before": interaction.reward,
        "session_reward": total,
    }


def again(session: Session, record: dict[str, Any]) -> None:
    """Let a session know of a request, or of a reward, what it knew when this was recorded."""
    event = record.get("event")
    if event == "session_weights":
        session.held[record["pool"]] = record["version"]
        return
    if event == "opened" and record.get("kind") == "sample":
        session.asked(Interaction(record["identity"], record["index"], record["request_id"]))
        return
    interaction = session.remembered(record.get("identity"), record.get("index"))
    if event == "reward":
        session.add(record["before"], record["reward"])
        if interaction is not None:
            interaction.reward = record["reward"]
    elif event == "closed":
        delivered = record.get("outcome") == "delivered"
        session.trouble = None if delivered else record.get("error") or record.get("outcome")
        if interaction is not None and delivered:
            session.answered(interaction, record.get("answer_id"))
        elif interaction is not None:
            session.dropped(interaction)


class Open:
    """The requests of sessions that have begun and not ended, as their records are read one after the other."""

    def __init__(self) -> None:
        self._claims: dict[tuple[str, str, int], int] = {}

    def read(self, record: dict[str, Any]) -> None:
        """Take in what this record tells."""
        step = {"opened": 1, "closed": -1}.get(record.get("event", ""))
        if step is not None:
            place = record["session"], record["identity"], record["index"]
            if (claims := self._claims.pop(place, 0) + step) > 0:
                self._claims[place] = claims

    def lost(self) -> Iterator[dict[str, Any]]:
        """The ends of those that were open when their process died."""
        for session, identity, index in self._claims:
            names = {"session": session, "identity": identity, "index": index}
            yield {"event": "closed", **names, "outcome": "failed", "error": "gateway-lost"}


def restored(run: str, record: dict[str, Any]) -> Session:
    """The session that a record tells of; its group knows nothing of it yet."""
    known = Known(
        run=run,
        session=record["session"],
        identity=record["identity"],
        ordinal=record["ordinal"],
        order=record["index_order"],
        seed=record["seed"],
        group=record["group"],
        member=record["member"],
    )
    group = None
    if record["group"] is not None:
        group = Group(run, record["group"], record["group_identity"], record["group_size"])
    return Session(
        known,
        bytes.fromhex(record["key_digest"]),
        record["submission"],
        group,
        failed_reward=record.get("failed_reward"),
        holds=record.get("weights") == "hold",
    )


def recalled(run: str, name: str, life: Iterable[dict[str, Any]]) -> Session:
    """A session as the records of its life leave it; one that has none of them was used without being created."""
    session = Session(Known(run, name, name), None)
    for record in life:
        if record["event"] == "session":
            session = restored(run, record)
        elif record["event"] == "session_weights":
            again(session, record)
        else:
            reward = record["session_reward"]
            session.state, session.why = record["state"], record["why"]
            session.stands(None, session.interactions, None if reward is None else Fraction(reward))
    return session


class Created:
    """Puts sessions together again whose records are read one after the other.

    Those of a group were written in one piece: one that was not written whole never was.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._members: list[Session] = []

    def read(self, record: dict[str, Any]) -> list[Session]:
        """The sessions that this record, with those before it, tells of."""
        session = restored(self._run, record)
        if session.group is None:
            return [session]
        group = self._members[0].group if self._members else None
        if group is None or group.id != session.group.id:
            group, self._members = session.group, []
        session.group = group
        self._members.append(session)
        if len(self._members) < group.size:
            return []
        members, self._members = self._members, []
        return members
