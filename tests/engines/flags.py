"""Do flags mean something to the real engine? Run by the engine's own Python: reads lists of flags as JSON, prints what
it took of each.

    python flags.py vllm '[["--seed", "0"]]'
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def vllm(lists: list[list[str]]) -> list[dict[str, Any]]:
    """What vLLM's own parser makes of them."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # type: ignore[import-not-found]
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm"))
    return [dict(vars(parser.parse_args(flags))) for flags in lists]


def sglang(lists: list[list[str]]) -> list[dict[str, Any]]:
    """What SGLang's own parser makes of them; `launch` lets it load on a CPU."""
    sys.path.insert(0, str(Path(__file__).parent / "sglang_cpu"))
    import launch  # type: ignore[import-not-found] # noqa: F401
    from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found]

    parser = argparse.ArgumentParser(prog="sglang")
    ServerArgs.add_cli_args(parser)
    return [dict(vars(parser.parse_args(["--model-path", "m", *flags]))) for flags in lists]


if __name__ == "__main__":
    print(json.dumps({"vllm": vllm, "sglang": sglang}[sys.argv[1]](json.loads(sys.argv[2])), default=str))
