"""The command `detgate`.

Each command imports what it runs when it runs: the server's parts take long to load, and `detgate seed` is
called in loops.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway import __version__

if TYPE_CHECKING:
    from gateway.settings import Settings

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `detgate` with `argv` (default: the process's own) and return its exit status.

    2: the command line or the configuration is wrong, or there is no room for what was to be written; standard error
    says why, a line a fault. 130: CTRL-C.
    """
    args = _parsed(sys.argv[1:] if argv is None else argv)
    command: Command = args.command
    from gateway.settings import InvalidSettings

    status = 0
    if sys.stdout is None:  # it is closed
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        status = command(args)
        # Here, and not when Python ends: what cannot be written would be an exit status of its own.
        sys.stdout.flush()
        return status
    except InvalidSettings as error:
        for line in error.lines:
            print(f"detgate: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has read enough, as `head` does. Python would complain once more when it ends.
        _hush()
        return status
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _hush()
        print(f"detgate: cannot be written: {error.strerror}", file=sys.stderr)
        return 2


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _hush() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Raises `SystemExit` where a command or a flag is unknown, and says which may have been meant."""
    parser = _parser()
    if not argv:
        parser.error("a command is needed; detgate --help lists them")
    if not argv[0].startswith("-") and argv[0] not in (*_COMMANDS, "worker"):
        parser.error(f"{argv[0]} is no command{_meant(argv[0], _COMMANDS)}")
    args, unknown = parser.parse_known_args(argv)
    of_command: argparse.ArgumentParser = args.__dict__.pop("parser", parser)
    if unknown:
        flags = of_command._option_string_actions
        of_command.error(f"{unknown[0]} is unknown here{_meant(unknown[0].partition('=')[0], flags)}")
    return args


def _meant(word: str, known: Iterable[str]) -> str:
    import difflib

    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _serve(args: argparse.Namespace) -> int:
    settings = _with_pools(args)
    from gateway import serve, workers

    if settings.workers > 1:
        return workers.run(settings, lambda: _settings(args), resume=args.resume, new_run=args.new_run)
    serve.run(settings, lambda: _settings(args), resume=args.resume, new_run=args.new_run)
    return 0


def _worker(args: argparse.Namespace) -> int:
    import socket

    from gateway import serve

    line, *sockets = (socket.socket(fileno=descriptor) for descriptor in args.descriptors)
    serve.work(line, sockets)
    return 0


def _demo(args: argparse.Namespace) -> int:
    from gateway import demo

    demo.run(_flags(args), resume=args.resume, new_run=args.new_run)
    return 0


def _sim(args: argparse.Namespace) -> int:
    from gateway import addresses, sim

    addresses.listens("host", args.host, "port", args.port)
    given = {key: value for key, value in vars(args).items() if key not in ("command", "host", "port")}
    sim.serve(sim.SimSettings(**given), args.host, args.port)
    return 0


def _config(args: argparse.Namespace) -> int:
    import json

    import yaml

    settings = _settings(args)
    shown = settings.masked()
    print(
        json.dumps(shown, indent=2, ensure_ascii=False)
        if args.json
        else yaml.safe_dump(shown, sort_keys=False, allow_unicode=True).rstrip()
    )
    for line in settings.warnings():
        print(f"detgate: warning: {line}", file=sys.stderr)
    return 0


def _seed(args: argparse.Namespace) -> int:
    import json

    from gateway import schemes

    settings = _settings(args)
    seed = schemes.load(settings.scheme).seed(settings.seed, args.identity, args.index, args.member)
    if args.json:
        asked = {"identity": args.identity, "index": args.index, "member": args.member}
        print(json.dumps({"seed": seed, "scheme": settings.scheme, "master_seed": settings.seed, **asked}))
    else:
        print(seed)
    return 0


def _new_key(args: argparse.Namespace) -> int:
    from gateway import keys

    key = keys.new()
    print(key)
    print(f"detgate: in the configuration: {keys.entry(key, args.name)}", file=sys.stderr)
    return 0


def _hash_key(args: argparse.Namespace) -> int:
    from getpass import getpass

    from gateway import keys

    key = getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()
    if not key.strip():
        print("detgate: a key is needed on standard input", file=sys.stderr)
        return 2
    print(keys.entry(key.strip(), args.name))
    return 0


def _diff(args: argparse.Namespace) -> int:
    from gateway.evidence import commands

    ledger = _settings(args).ledger.path
    return commands.diff(args.a, args.b, ledger, as_json=args.json, html=args.html, answers_only=args.answers_only)


def _doctor(args: argparse.Namespace) -> int:
    from gateway.evidence import doctor

    settings = _settings(args) if args.url else _with_pools(args)
    return doctor.doctor(settings, url=args.url, as_json=args.json)


def _verify(args: argparse.Namespace) -> int:
    from gateway.evidence import verify

    settings, files = _with_pools(args), {"as_json": args.json, "junit": args.junit}
    return verify.verify(settings, budget=args.budget, lanes=args.lane, tell=args.tell, **files)


def _with_pools(args: argparse.Namespace) -> Settings:
    from gateway.settings import InvalidSettings

    settings = _settings(args)
    if not settings.pools:
        raise InvalidSettings(["pools: none; list them in a file (--config), or name servers by --worker-urls"])
    return settings


def _launch_profile(args: argparse.Namespace) -> int:
    from gateway import launch
    from gateway.launch import formats

    wish = launch.Wish(
        hardware=args.hardware,
        role=args.role,
        model=args.model,
        host=args.host,
        port=args.port,
        tensor_parallel=args.tensor_parallel,
        prefix_cache=args.prefix_cache,
    )
    try:
        profile = launch.load(args.engine).profile(wish)
        profile.check(args.engine_version)
    except LookupError as error:
        print(f"detgate: {error.args[0]}", file=sys.stderr)
        return 2
    print(formats.as_json(profile) if args.json else formats.FORMATS[args.format](profile))
    return 0


def _replay_plans(args: argparse.Namespace) -> int:
    from gateway.evidence import commands

    return commands.replay_decisions(args.recorded, _settings(args).ledger.path, as_json=args.json)


def _replay_requests(args: argparse.Namespace) -> int:
    from gateway.evidence import commands

    settings = _settings(args) if args.url else _with_pools(args)
    return commands.replay_again(
        args.recorded, settings, url=args.url, config=args.config, run=args.as_run, as_json=args.json
    )


def _settings(args: argparse.Namespace) -> Settings:
    from gateway.settings import Settings

    return Settings.load(args.config, os.environ, _flags(args))


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    """The settings among the flags, nested as in the file."""
    from gateway.settings.sources import from_text, nested

    assigned = (assignment.partition("=") for assignment in getattr(args, "assignments", []))
    return nested(
        [(key, value) for key, value in vars(args).items() if key in _SETTINGS]
        + [(key, from_text(text, f"--set {key}")) for key, _, text in assigned]
    )


_SETTINGS = {
    "seed": ("--seed", "master seed"),
    "profile": ("--profile", "off, balanced or strict"),
    "run": ("--run", "name of the run"),
    "scheme": ("--scheme", "how seeds are derived: v1, areal or offset"),
    "index_order": ("--index-order", "arrival or content"),
    "state": ("--state", "memory, or redis://host:6379/0"),
    "host": ("--host", "address to listen on"),
    "port": ("--port", "port to listen on; 0: a free one"),
    "admin_port": ("--admin-port", "port for administration and /metrics, which --port then refuses"),
    "workers": ("--workers", "processes that serve; more than one needs state: redis://…"),
    "insecure": ("--insecure", "listen off loopback without keys too"),
    "ledger.path": ("--ledger", "folder of the runs' records"),
    "log.level": ("--log-level", "debug, info, warning or error"),
    "engine": ("--engine", "what runs at the worker URLs (vllm)"),
    "worker_urls": ("--worker-urls", "servers of one pool, as URL or NAME=URL"),
}
"""Settings that have a flag of their own, by their key: the flag, and its help."""

_FORMS: dict[str, dict[str, Any]] = {
    "insecure": {"action": "store_true"},
    "worker_urls": {"nargs": "+", "metavar": "URL"},
}
"""What a flag takes, where that is not one word."""


_FIRST = """\
to try it without an engine:  detgate demo
before engines of your own:   detgate serve --engine vllm --worker-urls http://a:8000 http://b:8000
what a command takes:         detgate COMMAND --help
"""

_COMMANDS = (
    *("serve", "demo", "sim", "config", "seed", "key", "launch-profile"),
    *("doctor", "verify", "diff", "replay"),
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="detgate",
        description="A deterministic inference gateway.",
        epilog=_FIRST,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"detgate {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: Command, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.set_defaults(command=command, parser=added)
        return added

    serve = add("serve", _serve, "the gateway before the pools of the configuration")
    _serve_flags(serve)
    _run_flags(serve)
    # Not for people: what `serve` with several workers starts. Without a help text it is not listed.
    commands.add_parser("worker").set_defaults(command=_worker)
    commands.choices["worker"].add_argument("descriptors", nargs="+", type=int)
    demo = add("demo", _demo, "simulated replicas with the gateway in front")
    _demo_flags(demo)
    _run_flags(demo)
    _sim_flags(add("sim", _sim, "one simulated engine; POST /_sim switches its faults"))
    _config_flags(add("config", _config, "what is in force, secrets masked"))
    _seed_flags(add("seed", _seed, "the seed that a request gets"))
    _key_flags(add("key", _new_key, "keys that open the gateway, and hashes of them for the configuration"))
    _launch_flags(add("launch-profile", _launch_profile, "how to start an engine so that its answers can repeat"))
    _doctor_flags(add("doctor", _doctor, "what breaks determinism; exit 0 strict would serve, 1 refuse, 2 not known"))
    _verify_flags(add("verify", _verify, "canaries to every replica: does it repeat? exit 0 all passed, 1 not"))
    _diff_flags(add("diff", _diff, "where two recorded runs parted, and why; exit 0 equal, 1 different, 2 neither"))
    _replay_flags(add("replay", _replay_plans, "a recorded run again: its decisions, or its requests"))
    return parser


def _serve_flags(parser: argparse.ArgumentParser) -> None:
    _file_flag(parser)
    _setting_flags(parser, _SETTINGS)


def _run_flags(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--resume", action="store_true", help="go on with the run, although it has ended")
    which.add_argument(
        "--new-run",
        action="store_true",
        help="begin a run without a name, although the last of these did not end cleanly",
    )


def _config_flags(parser: argparse.ArgumentParser) -> None:
    _serve_flags(parser)
    parser.add_argument("--json", action="store_true", help="as JSON, not YAML")


def _demo_flags(parser: argparse.ArgumentParser) -> None:
    _setting_flags(parser, [key for key in _SETTINGS if key not in ("engine", "worker_urls", "workers", "admin_port")])


def _seed_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("identity", metavar="IDENTITY", type=_identity, help="the (effective) identity, such as 17:3")
    parser.add_argument("index", metavar="INDEX", type=_index, help="the request's place in its session, from 0")
    parser.add_argument("--member", type=_index, help="place in the group, for scheme offset")
    _file_flag(parser)
    _setting_flags(parser, ["seed", "scheme"])
    parser.add_argument("--json", action="store_true", help="with everything that it follows from")


def _key_flags(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    for what, command, text in (
        ("new", _new_key, "make a key: it on standard output, what the configuration holds of it on standard error"),
        ("hash", _hash_key, "read a key from standard input and print what the configuration holds of it"),
    ):
        one = commands.add_parser(what, help=text, description=text, allow_abbrev=False)
        one.set_defaults(command=command, parser=one)
        one.add_argument("name", metavar="NAME", nargs="?", type=_name, help="who has it, for logs and ledger")


def _diff_flags(parser: argparse.ArgumentParser) -> None:
    for name, metavar in (("a", "A"), ("b", "B")):
        parser.add_argument(name, metavar=metavar, help="a run's name or folder, a file of its records, or a glob")
    parser.add_argument(
        "--answers-only", action="store_true", help="what the client cannot have noticed is no difference"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page to look at, too")
    parser.add_argument("--json", action="store_true", help="as JSON")
    _file_flag(parser)
    _setting_flags(parser, ["ledger.path"])


_FLEET = ("profile", "ledger.path", "engine", "worker_urls")
"""Settings with a flag for commands that ask replicas."""


def _doctor_flags(parser: argparse.ArgumentParser) -> None:
    _file_flag(parser)
    _setting_flags(parser, _FLEET)
    parser.add_argument("--url", metavar="URL", help="ask a running gateway what it knows, not the replicas")
    parser.add_argument("--json", action="store_true", help="as JSON")


def _launch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", choices=("vllm", "sglang"), help="which engine")
    parser.add_argument("--hardware", default="hopper", help="ampere, hopper, blackwell, mi300, cpu … (hopper)")
    parser.add_argument("--role", choices=("generate", "reward"), default="generate", help="sample, or score")
    parser.add_argument("--model", default="MODEL", help="name or folder of the model")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (0.0.0.0)")
    parser.add_argument("--port", type=_port, default=8000, help="port to listen on")
    parser.add_argument("--tensor-parallel", type=_positive, default=1, metavar="N", help="GPUs of one replica")
    parser.add_argument("--prefix-cache", action="store_true", help="keep the prefix cache, at the cost that is told")
    parser.add_argument("--engine-version", metavar="V", help="refuse if the engine is older than the mode")
    parser.add_argument(
        "--format",
        choices=("text", "shell", "script", "env", "compose"),
        default="text",
        help="for people; a command; a script; variables to source before srun or ray; a compose service",
    )
    parser.add_argument("--json", action="store_true", help="everything, with reasons and sources")


def _replay_flags(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    text = "make every recorded decision again, without an engine; exit 1 if one comes out otherwise"
    plans = commands.add_parser("plans", help=text, description=text, allow_abbrev=False)
    plans.set_defaults(command=_replay_plans, parser=plans)
    _recorded_flags(plans)
    text = "send a recorded run again, to a running gateway (--url) or to one of its own (--config), and compare"
    requests = commands.add_parser("requests", help=text, description=text, allow_abbrev=False)
    requests.set_defaults(command=_replay_requests, parser=requests)
    _recorded_flags(requests)
    requests.add_argument("--url", metavar="URL", help="a running gateway; its keys come from the configuration")
    requests.add_argument("--run", dest="as_run", metavar="NAME", help="name of the new run (LEDGER's with -replay)")


def _recorded_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recorded", metavar="LEDGER", help="a run's name or folder, a file of its records, or a glob")
    parser.add_argument("--json", action="store_true", help="as JSON")
    _file_flag(parser)
    _setting_flags(parser, ["ledger.path"])


def _verify_flags(parser: argparse.ArgumentParser) -> None:
    _file_flag(parser)
    _setting_flags(parser, _FLEET)
    parser.add_argument(
        "--budget", type=_duration, default=60.0, metavar="TIME", help="after which no canary is begun, as in 90s or 2m"
    )
    parser.add_argument(
        "--no-lane", dest="lane", action="store_false", help="send company at once, whatever the pool's lane"
    )
    parser.add_argument(
        "--json", type=Path, nargs="?", const=Path("-"), metavar="FILE", help="as JSON; into a file if one is named"
    )
    parser.add_argument("--junit", type=Path, metavar="FILE", help="a JUnit report too")
    parser.add_argument("--tell", metavar="URL", help="a running gateway that shall have the verdicts too")


def _sim_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", required=True, choices=("vllm", "sglang"), help="which to simulate")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=_port, default=8100, help="port to listen on; 0: a free one")
    engine = parser.add_argument_group("the engine", argument_default=argparse.SUPPRESS)
    engine.add_argument("--role", choices=("generate", "reward"), help="sample, or score")
    engine.add_argument("--model", help="name of its model")
    engine.add_argument("--api-key", help="bearer token that it wants")
    engine.add_argument("--max-num-seqs", type=_positive, help="requests in one batch")
    engine.add_argument("--token-seconds", type=_seconds, help="seconds of one decoding step")
    for flag, text in (
        ("--deterministic", "its deterministic mode"),
        ("--batch-dependent", "answers that change with the rest of the batch"),
        ("--prefix-cache", "a prefix cache"),
        ("--dev-mode", "vLLM's development routes"),
    ):
        engine.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)


def _file_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="the configuration, in YAML")


def _setting_flags(parser: argparse.ArgumentParser, keys: Iterable[str]) -> None:
    group = parser.add_argument_group("settings", "stronger than the file and DETGATE_* variables")
    for key in keys:
        flag, text = _SETTINGS[key]
        form = _FORMS.get(key, {"metavar": key.rpartition(".")[2].upper()})
        group.add_argument(flag, dest=key, default=argparse.SUPPRESS, help=text, **form)
    group.add_argument(
        "--set",
        dest="assignments",
        type=_assignment,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any setting, as in routing.slack=inf",
    )


def _assignment(text: str) -> str:
    key, equals, _ = text.partition("=")
    if not (key.strip() and equals):
        raise argparse.ArgumentTypeError("KEY=VALUE is needed, as in routing.slack=inf")
    return text


def _name(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", text) is None:
        raise argparse.ArgumentTypeError("letters, digits, `.`, `_` and `-`, 128 at most, are needed")
    return text


def _identity(text: str) -> str:
    """What content order and a sample that goes on put behind an identity does not count."""
    from gateway.core import identity, resume
    from gateway.core.errors import CallerFault

    origin = resume.origin(text)
    bare = re.sub(r"/[0-9a-f]{16}$", "", text if origin is None else origin.identity)
    try:
        identity.text(os.fsencode(bare), "it")
    except CallerFault as fault:
        raise argparse.ArgumentTypeError(fault.message) from None
    return text


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) > 65535:
        raise argparse.ArgumentTypeError("a whole number from 0 to 65535 is needed")
    return int(text)


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError("a whole number from 1 is needed")
    return int(text)


def _seconds(text: str) -> float:
    if re.fullmatch(r"\d*\.?\d+", text) is None:
        raise argparse.ArgumentTypeError("seconds are needed, as in 0.01")
    return float(text)


def _duration(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|)", text)
    if found is None:
        raise argparse.ArgumentTypeError("a time is needed, as in 60s, 2m or 1h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def _index(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) >= 2**31:
        raise argparse.ArgumentTypeError("a whole number from 0 to 2147483647 is needed")
    return int(text)
