"""SGLang. Its deterministic mode is a flag that it tells of, and the only one in which it honours seeds."""

from __future__ import annotations

from gateway.launch import Profile, Setting, Wish

VERSION = "0.5.23"

_DOCS = "https://docs.sglang.io/advanced_features/deterministic_inference.html"
_ISSUE = "https://github.com/sgl-project/sglang/issues/"
_PULL = "https://github.com/sgl-project/sglang/pull/"
_SOURCE = "SGLang 0.5.23, sglang/srt/arg_groups"
_SEEN = "seen on SGLang 0.5.23"

_BACKENDS = {
    "ampere": ("fa3", f"what the engine itself takes there ({_SOURCE}/overrides.py)"),
    "ada": ("fa3", f"what the engine itself takes there ({_SOURCE}/overrides.py)"),
    "hopper": ("fa3", f"{_PULL}10651"),
    "blackwell": ("flashinfer", f"what the engine itself takes there ({_SOURCE}/overrides.py), {_PULL}10645"),
    "mi300": ("triton", f"{_PULL}10694, tried on NVIDIA and AMD"),
    "xpu": ("intel_xpu", f"{_SOURCE}/choices.py"),
    "ascend": ("ascend", f"{_SOURCE}/choices.py"),
}
HARDWARE = tuple(_BACKENDS)


def profile(wish: Wish) -> Profile:
    """How SGLang is started. Raises `LookupError` for hardware on which it has no deterministic mode."""
    if wish.hardware not in HARDWARE:
        why = "; on a CPU it has no deterministic mode" if wish.hardware == "cpu" else ""
        raise LookupError(f"SGLang: no profile for {wish.hardware!r}{why}; there are {', '.join(HARDWARE)}")
    return Profile(
        engine="sglang",
        wish=wish,
        since="0.5.4" if wish.hardware not in ("xpu", "ascend") else VERSION,
        claim=_claim(wish.hardware),
        command=(
            *("python3", "-m", "sglang.launch_server", "--model-path", wish.model),
            *("--host", wish.host, "--port", str(wish.port)),
        ),
        environment=tuple(_environment(wish)),
        flags=tuple(_flags(wish)),
        remarks=tuple(_remarks(wish)),
    )


def _claim(hardware: str) -> str:
    if hardware in ("xpu", "ascend"):
        return f"The engine's source counts the backend among the deterministic ones: {_SOURCE}/choices.py; {_DOCS}"
    return (
        "Deterministic mode, since 0.5.3 (with --sampling-defaults since 0.5.4), is documented for the backends "
        f"flashinfer, fa3 and triton: {_DOCS}"
    )


def _environment(wish: Wish) -> list[Setting]:
    environment = [
        Setting(
            "PYTHONHASHSEED",
            "0",
            "Python's hash() is the same in every process and run",
            "https://docs.python.org/3/using/cmdline.html#envvar-PYTHONHASHSEED",
        )
    ]
    if wish.hardware in ("ampere", "ada", "hopper", "blackwell"):
        environment.append(
            Setting(
                "CUBLAS_WORKSPACE_CONFIG",
                ":4096:8",
                "cuBLAS repeats its sums from run to run",
                "https://docs.nvidia.com/cuda/cublas/#results-reproducibility",
            )
        )
        if wish.tensor_parallel > 1:
            why = "one tree and its channels, so one order of sums between GPUs; the engine sets it too"
            source = f"{_SOURCE}/attention_hook.py"
            environment += [
                Setting("NCCL_ALGO", "allreduce:tree", why, source),
                Setting("NCCL_MIN_NCHANNELS", "8", why, source),
                Setting("NCCL_MAX_NCHANNELS", "8", why, source),
            ]
    return environment


def _flags(wish: Wish) -> list[Setting]:
    backend, source = _BACKENDS[wish.hardware]
    flags = [
        Setting(
            "--enable-deterministic-inference",
            None,
            "kernels whose sums do not depend on the batch; without it seeds are ignored and nothing says so",
            f"{_DOCS}; {_SEEN}",
        ),
        Setting("--attention-backend", backend, "chosen by name: with another the server does not start", source),
        Setting("--sampling-backend", "pytorch", "the one whose noise follows from seed and position", _DOCS),
        Setting("--random-seed", "0", "what has no seed of its own; the gateway gives each request one", _SEEN),
        Setting(
            "--sampling-defaults",
            "openai",
            "sampling defaults do not come from a file of the model, whose min_p would end the server",
            _SEEN,
        ),
        Setting("--enable-metrics", None, "the gateway reads what is in it", _SEEN),
    ]
    if wish.tensor_parallel > 1:
        flags.append(
            Setting(
                "--tp-size",
                str(wish.tensor_parallel),
                "the same on every replica and in every run: it changes results",
                _DOCS,
            )
        )
    if wish.role == "reward":
        flags.append(Setting("--is-embedding", None, "scores instead of tokens", _SEEN))
        flags.append(Setting("--max-running-requests", "1", "nothing else in the batch, whoever asks", _SEEN))
    if not wish.prefix_cache or wish.role == "reward":
        flags.append(
            Setting(
                "--disable-radix-cache",
                None,
                "a warm prefix is computed otherwise than a cold one",
                f"{_ISSUE}34683, {_PULL}25479; scores: {_SEEN}",
            )
        )
    return flags


def _remarks(wish: Wish) -> list[str]:
    remarks = [
        "`detgate verify` tells whether it is so here; a flag is a claim.",
        "min_p above 0 ends the whole server in this mode: the gateway refuses it.",
        f"Several DP ranks with DP attention were reported to break it ({_PULL}11023): one rank a replica.",
        "For long rollouts of mixture-of-experts models some trainers add --disable-overlap-schedule and"
        " --disable-cuda-graph.",
    ]
    if wish.prefix_cache and wish.hardware == "blackwell":
        remarks.append("The engine turns its radix cache off with flashinfer, whatever is asked.")
    if wish.hardware == "blackwell":
        remarks.append(
            f"Absorbed-MLA models (DeepSeek) need --attention-backend triton there ({_PULL}12000); Gemma-4 did not"
            f" start: {_ISSUE}34683."
        )
    return remarks
