"""vLLM. Its batch-invariant mode is an environment variable, so nothing on the command line shows it."""

from __future__ import annotations

from gateway.launch import Profile, Setting, Wish

VERSION = "0.32.0"

_DOCS = "https://docs.vllm.ai/en/v0.32.0/features/batch_invariance/"
_ISSUE = "https://github.com/vllm-project/vllm/issues/"
_PULL = "https://github.com/vllm-project/vllm/pull/"
_SOURCE = "vLLM 0.32.0, vllm/model_executor/determinism/batch_invariant.py"
_CONFIG = "vLLM 0.32.0, vllm/config/model.py"
_CPU = "seen on vLLM 0.32.0 on a CPU"

_NVIDIA_SINCE = {
    "ampere": ("0.22.0", f"compute capability 8.0; compiled too since {_PULL}42456"),
    "ada": ("0.22.0", f"compute capability 8.9, tried with 0.22.0 in {_PULL}44435"),
    "hopper": ("0.13.0", f"compute capability 9.0, since 0.11.1 ({_ISSUE}29571), with the flags below since 0.13.0"),
    "blackwell": (
        "0.13.0",
        f"compute capability 10.0, since 0.11.1 ({_ISSUE}29571, {_PULL}27856), with the flags below since 0.13.0",
    ),
}
_AMD = ("mi200", "mi300", "mi350")
HARDWARE = (*_NVIDIA_SINCE, *_AMD, "xpu", "cpu")


def profile(wish: Wish) -> Profile:
    """How vLLM is started. Raises `LookupError` for hardware that is not in `HARDWARE`."""
    if wish.hardware not in HARDWARE:
        raise LookupError(f"vLLM: no profile for {wish.hardware!r}; there are {', '.join(HARDWARE)}")
    since, claim = _claim(wish.hardware)
    return Profile(
        engine="vllm",
        wish=wish,
        since=since,
        claim=claim,
        command=("vllm", "serve", wish.model, "--host", wish.host, "--port", str(wish.port)),
        environment=tuple(_environment(wish)),
        flags=tuple(_flags(wish)),
        remarks=tuple(_remarks(wish)),
    )


def _claim(hardware: str) -> tuple[str, str]:
    if hardware in _NVIDIA_SINCE:
        since, words = _NVIDIA_SINCE[hardware]
        return since, f"Batch-invariant mode is documented (beta) for NVIDIA from 8.0 on: {words}; {_DOCS}"
    if hardware == "cpu":
        return VERSION, f"No batch-invariant mode; one request at a time repeats to the last bit ({_CPU})"
    what = "AMD gfx90a, gfx942 and gfx950" if hardware in _AMD else "Intel GPUs with Triton"
    return VERSION, f"Batch-invariant mode is documented (beta) for {what}: {_DOCS}"


def _environment(wish: Wish) -> list[Setting]:
    fixed = [
        Setting(
            "PYTHONHASHSEED",
            "0",
            "Python's hash() is the same in every process and run; block hashes of the prefix cache begin with it",
            "vLLM 0.32.0, vllm/v1/core/kv_cache_utils.py",
        ),
        Setting(
            "VLLM_WORKER_MULTIPROC_METHOD",
            "spawn",
            "workers inherit no state but the environment",
            "vLLM 0.32.0, vllm/envs.py",
        ),
    ]
    if wish.hardware == "cpu":
        return [
            *fixed,
            Setting("OMP_NUM_THREADS", "1", "sums are made in one order whatever the machine's load", _CPU),
            Setting("VLLM_CPU_OMP_THREADS_BIND", "nobind", "the number of threads is the one above, not vLLM's", _CPU),
        ]
    invariant = Setting("VLLM_BATCH_INVARIANT", "1", "kernels whose sums do not depend on the batch", _DOCS)
    if wish.hardware in _AMD or wish.hardware == "xpu":
        return [invariant, *fixed]
    workspace = ":16:8" if wish.hardware in ("hopper", "blackwell") else ":4096:8"
    cublas = Setting(
        "CUBLAS_WORKSPACE_CONFIG",
        workspace,
        "no split of a product's sum; vLLM sets it in its workers, this sets it in every process",
        _SOURCE,
    )
    return [invariant, *fixed, cublas, *(_nccl() if wish.tensor_parallel > 1 else ())]


def _nccl() -> list[Setting]:
    why = "one algorithm, protocol and channel, so one order of sums between GPUs, in trainers that join too"
    values = {
        "NCCL_LAUNCH_MODE": "GROUP",
        "NCCL_COLLNET_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_P2P_NET_DISABLE": "1",
        "NCCL_MIN_NCHANNELS": "1",
        "NCCL_MAX_NCHANNELS": "1",
        "NCCL_PROTO": "Simple",
        "NCCL_ALGO": "ring,tree;allreduce:tree",
        "NCCL_NTHREADS": "1",
        "NCCL_SOCKET_NTHREADS": "1",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    }
    return [Setting(name, value, why, _SOURCE) for name, value in values.items()]


def _flags(wish: Wish) -> list[Setting]:
    flags = [
        Setting("--seed", "0", "weights of tests and what has no seed of its own; the gateway gives each request one",
                _CONFIG),
        Setting("--no-async-scheduling", None, "scheduling ahead was reported to change answers", f"{_ISSUE}51287"),
        Setting(
            "--generation-config",
            "vllm",
            "sampling defaults do not come from a file of the model",
            _CONFIG,
        ),
    ]  # fmt: skip
    if wish.tensor_parallel > 1:
        flags.append(
            Setting(
                "--tensor-parallel-size",
                str(wish.tensor_parallel),
                "the same on every replica and in every run: it changes results",
                f"{_ISSUE}51290",
            )
        )
    flags.extend(_attention(wish.hardware))
    if wish.hardware == "cpu":
        flags += [
            Setting("--dtype", "float32", "bfloat16 on a CPU loses more to the order of sums", _CPU),
            Setting("--enforce-eager", None, "no compiled graphs that differ by batch size", _CPU),
            Setting(
                "--no-enable-chunked-prefill", None, "a seeded prompt prefilled in two parts ends the engine", _CPU
            ),
        ]
    if wish.role == "reward":
        flags.append(
            Setting(
                "--runner",
                "pooling",
                "scores instead of tokens",
                _CONFIG,
            )
        )
    if wish.role == "reward" or wish.hardware == "cpu":
        flags.append(Setting("--max-num-seqs", "1", "nothing else in the batch, whoever asks", _CPU))
    else:
        flags.append(Setting("--max-num-seqs", "128", "from 256 on a norm's kernel changes", f"{_ISSUE}48271"))
    if not wish.prefix_cache:
        flags.append(
            Setting(
                "--no-enable-prefix-caching",
                None,
                "a warm prefix is computed in other blocks than a cold one",
                f"{_ISSUE}42019; scores: {_CPU}",
            )
        )
    return flags


def _attention(hardware: str) -> list[Setting]:
    if hardware == "hopper":
        return [
            Setting("--attention-backend", "FLASH_ATTN", "chosen by name, not by what is installed", _DOCS),
            Setting(
                "--attention-config.flash_attn_version",
                "2",
                "FlashAttention 3 changes a decode when an unrelated prefill shares its batch; 2 does not",
                f"{_ISSUE}51902, {_PULL}48694",
            ),
        ]
    if hardware == "cpu":
        return []
    backend = "FLASH_ATTN" if hardware in ("ampere", "ada") else "TRITON_ATTN"
    return [
        Setting(
            "--attention-backend",
            backend,
            "one of those that vLLM counts as batch-invariant, chosen by name",
            f"{_DOCS}; vLLM 0.32.0, vllm/v1/attention/backends",
        )
    ]


def _remarks(wish: Wish) -> list[str]:
    remarks = ["`detgate verify` tells whether it is so here; a flag is a claim."]
    if wish.hardware == "cpu":
        remarks.append("Answers change with the batch: give the pool `lane: {scope: replica, limit: 1}`.")
    else:
        remarks.append(
            f"Reported and open: answers change with some 44 requests at once ({_ISSUE}51187); a preempted request"
            f" begins its noise anew ({_ISSUE}19940)."
        )
        remarks.append("Models with another attention than the usual (MLA, Mamba) need another --attention-backend.")
        remarks.append("With an FP8 KV cache, scoring differs from sampling on Hopper "
                       f"({_ISSUE}54035): leave --kv-cache-dtype at auto.")  # fmt: skip
    if wish.tensor_parallel > 1:
        remarks.append(f"Tensor parallelism was reported to break batch invariance before 0.32: {_ISSUE}51290.")
    if wish.prefix_cache:
        remarks.append(f"With the prefix cache on, prompt logprobs depend on what was asked before: {_ISSUE}42019.")
    remarks.append(
        "The mode cannot be asked for from outside, so answers are marked `unverified` until verified, declared, or"
        " told by VLLM_SERVER_DEV_MODE=1, which opens routes that change the server: for closed networks only."
    )
    return remarks
