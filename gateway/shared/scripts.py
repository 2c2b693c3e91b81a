"""The scripts that the store runs, each one step. The files of `lua` say what each takes and gives."""

from __future__ import annotations

from importlib.resources import files

from gateway.shared.link import Family, Script

_FOLDER = files("gateway.shared") / "lua"


def read(name: str) -> str:
    """The source of one."""
    return (_FOLDER / f"{name}.lua").read_text(encoding="utf-8")


def _of_run(name: str) -> Script:
    return Script(read("rule") + read(name))


CLAIM = _of_run("claim")
COMPLETE = _of_run("complete")
SETTLE = _of_run("settle")
TAKE_PART = _of_run("take_part")
REPORT = _of_run("report")
BEAT = _of_run("beat")
LEAVE = _of_run("leave")
CHANGES = _of_run("changes")
ISSUED = _of_run("issued")
SESSIONS = _of_run("sessions")
SETTLED = Script(read("settled"))
GATEWAYS = Script(read("gateways"))
LOOK = Script(read("look"))
FIRST = Script(read("first"))


def keys(run: str, gateway: str) -> tuple[bytes, bytes, bytes]:
    """The keys of a run, all in one slot of a cluster: its state, what was released, the gateway's live claims."""
    prefix = prefix_of(run)
    return prefix + b"state", prefix + b"released", prefix + b"claims:" + gateway.encode()


def prefix_of(run: str) -> bytes:
    """What every key of a run begins with."""
    return b"detgate:{%b}:" % run.encode()


def families(run: str, gateway: str) -> dict[Family, tuple[bytes, ...]]:
    """All keys of a run, by what needs them. Where ids stand in a name, with an empty one, which no other key has."""
    prefix = prefix_of(run)
    return {
        Family(what, run): tuple(prefix + name.encode() for name in names.split())
        for what, names in {
            "counters": f"state released claims:{gateway} beats gone ends missing awaited over",
            "changes": "changes changes:list changes:heard changes:removed",
            "sessions": "sessions:about sessions:events sessions:all sessions:ended sessions:order sessions:keys "
            "sessions:groups sessions:ordinals sessions:idle sessions:trouble session::recent session::rewards "
            "session::held group::held",
            "guards": "firsts:",
        }.items()
    }


MEETING = (b"detgate:server",)
"""The key that says since when gateways meet at this server."""
