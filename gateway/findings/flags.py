"""Since when an engine has what a finding asks for: read in the sources of its releases, the first that has it and the
last one before that has not."""

from __future__ import annotations

import re
from typing import NamedTuple

from gateway.findings.versions import numbers


class Since(NamedTuple):
    """Where a flag, variable or field of a flag first stands."""

    version: str
    """The first release that has it."""
    lacked: str | None
    """The release before, which has it not; None: the first one that could be looked at has it."""
    file: str
    """The file of `version` that it stands in."""


_ARGS = "vllm/engine/arg_utils.py"
_ENVS = "vllm/envs.py"
_COMPILATION = "vllm/config/compilation.py"
_SERVER_ARGS = "python/sglang/srt/server_args.py"

FLAGS: dict[str, dict[str, Since]] = {
    "vllm": {
        "VLLM_BATCH_INVARIANT": Since("0.11.1", "0.11.0", "vllm/model_executor/layers/batch_invariant.py"),
        "VLLM_SERVER_DEV_MODE": Since("0.7.0", "0.6.6", _ENVS),
        "VLLM_USE_FLASHINFER_SAMPLER": Since("0.5.5", "0.5.4", _ENVS),
        "--attention-backend": Since("0.13.0", "0.12.0", _ARGS),
        "--attention-config": Since("0.13.0", "0.12.0", _ARGS),
        "--compilation-config": Since("0.6.5", "0.6.4.post1", _ARGS),
        "enable_sp": Since("0.12.0", "0.11.2", _COMPILATION),
        "flash_attn_version": Since("0.13.0", "0.12.0", "vllm/config/attention.py"),
        "fuse_allreduce_rms": Since("0.12.0", "0.11.2", _COMPILATION),
        "--generation-config": Since("0.6.6", "0.6.5", _ARGS),
        "--max-num-seqs": Since("0.1.0", None, _ARGS),
        "--no-async-scheduling": Since("0.10.0", "0.9.2", _ARGS),
        "--no-enable-prefix-caching": Since("0.6.5", "0.6.4.post1", _ARGS),
        "--scheduling-policy": Since("0.6.3", "0.6.2", _ARGS),
        "--speculative-config": Since("0.8.2", "0.8.1", _ARGS),
    },
    "sglang": {
        "--attention-backend": Since("0.3.1", "0.3.0", _SERVER_ARGS),
        "--disable-cuda-graph": Since("0.1.20", "0.1.17", _SERVER_ARGS),
        "--disable-overlap-schedule": Since("0.3.6", "0.3.5.post2", _SERVER_ARGS),
        "--disable-radix-cache": Since("0.1.13", "0.1.12", _SERVER_ARGS),
        "--enable-deterministic-inference": Since("0.5.3", "0.5.2", _SERVER_ARGS),
        "--enable-dp-attention": Since("0.3.6", "0.3.5.post2", _SERVER_ARGS),
        "--enable-priority-scheduling": Since("0.5.3", "0.5.2", _SERVER_ARGS),
        "--preferred-sampling-params": Since("0.4.7", "0.4.6", _SERVER_ARGS),
        "--sampling-backend": Since("0.3.1", "0.3.0", _SERVER_ARGS),
        "--sampling-defaults": Since("0.5.3.post1", "0.5.3", _SERVER_ARGS),
        "--speculative-algorithm": Since("0.4.2", "0.4.1", _SERVER_ARGS),
        "--tp-size": Since("0.1.5", None, _SERVER_ARGS),
    },
}
"""By engine and name."""

_REPOSITORIES = {"vllm": "vllm-project/vllm", "sglang": "sgl-project/sglang"}
_WORD = re.compile(r"--[a-z][a-z-]*|[A-Za-z][A-Za-z_]*_[A-Za-z_]+")


def since(engine: str, mend: str | None) -> str | None:
    """The first release that has all that `mend` names; None where it names nothing, or what to leave out."""
    if mend is None or mend.startswith("no "):
        return None
    known = FLAGS.get(engine, {})
    named = [known[word].version for word in _WORD.findall(mend) if word in known]
    return max(named, key=numbers, default=None)


def source(engine: str, flag: Since) -> str:
    """Where it stands, as a link."""
    return f"https://github.com/{_REPOSITORIES[engine]}/blob/v{flag.version}/{flag.file}"
