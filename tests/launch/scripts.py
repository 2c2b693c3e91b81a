"""The start scripts in deploy/engines, made from the launch profiles.

python -m tests.launch.scripts        brings deploy/engines up to date
"""

from __future__ import annotations

from pathlib import Path

from gateway.launch import Role, Wish, load
from gateway.launch.formats import script

FOLDER = Path(__file__).parents[2] / "deploy" / "engines"

KEPT: tuple[tuple[str, str], ...] = (
    ("vllm", "ampere"),
    ("vllm", "hopper"),
    ("vllm", "blackwell"),
    ("vllm", "cpu"),
    ("sglang", "hopper"),
    ("sglang", "blackwell"),
)
"""The profiles that are kept as files; `detgate launch-profile --format script` prints any."""

ROLES: tuple[tuple[Role, str], ...] = (("generate", ""), ("reward", "-reward"))


def scripts() -> dict[str, str]:
    """The text of each script, by its file's name."""
    return {
        f"{engine}-{hardware}{suffix}.sh": script(load(engine).profile(Wish(hardware, role))) + "\n"
        for engine, hardware in KEPT
        for role, suffix in ROLES
    }


def main() -> None:
    """Write the scripts."""
    for name, text in scripts().items():
        path = FOLDER / name
        path.write_text(text)
        path.chmod(0o755)


if __name__ == "__main__":
    main()
