#!/bin/sh
# Usage: vllm-hopper.sh MODEL [PORT [OPTION ...]]
# HOST is the address to listen on, 127.0.0.1 where it is not set.
#
# vllm on hopper, from version 0.13.0. Batch-invariant mode is documented (beta) for NVIDIA from 8.0 on: compute capability 9.0, since 0.11.1 (https://github.com/vllm-project/vllm/issues/29571), with the flags below since 0.13.0; https://docs.vllm.ai/en/v0.32.0/features/batch_invariance/
# VLLM_BATCH_INVARIANT=1
# kernels whose sums do not depend on the batch [https://docs.vllm.ai/en/v0.32.0/features/batch_invariance/]
# PYTHONHASHSEED=0
# Python's hash() is the same in every process and run; block hashes of the prefix cache begin with it [vLLM 0.32.0, vllm/v1/core/kv_cache_utils.py]
# VLLM_WORKER_MULTIPROC_METHOD=spawn
# workers inherit no state but the environment [vLLM 0.32.0, vllm/envs.py]
# CUBLAS_WORKSPACE_CONFIG=:16:8
# no split of a product's sum; vLLM sets it in its workers, this sets it in every process [vLLM 0.32.0, vllm/model_executor/determinism/batch_invariant.py]
# --seed 0
# weights of tests and what has no seed of its own; the gateway gives each request one [vLLM 0.32.0, vllm/config/model.py]
# --no-async-scheduling
# scheduling ahead was reported to change answers [https://github.com/vllm-project/vllm/issues/51287]
# --generation-config vllm
# sampling defaults do not come from a file of the model [vLLM 0.32.0, vllm/config/model.py]
# --attention-backend FLASH_ATTN
# chosen by name, not by what is installed [https://docs.vllm.ai/en/v0.32.0/features/batch_invariance/]
# --attention-config.flash_attn_version 2
# FlashAttention 3 changes a decode when an unrelated prefill shares its batch; 2 does not [https://github.com/vllm-project/vllm/issues/51902, https://github.com/vllm-project/vllm/pull/48694]
# --max-num-seqs 128
# from 256 on a norm's kernel changes [https://github.com/vllm-project/vllm/issues/48271]
# --no-enable-prefix-caching
# a warm prefix is computed in other blocks than a cold one [https://github.com/vllm-project/vllm/issues/42019; scores: seen on vLLM 0.32.0 on a CPU]
# `detgate verify` tells whether it is so here; a flag is a claim.
# Reported and open: answers change with some 44 requests at once (https://github.com/vllm-project/vllm/issues/51187); a preempted request begins its noise anew (https://github.com/vllm-project/vllm/issues/19940).
# Models with another attention than the usual (MLA, Mamba) need another --attention-backend.
# With an FP8 KV cache, scoring differs from sampling on Hopper (https://github.com/vllm-project/vllm/issues/54035): leave --kv-cache-dtype at auto.
# The mode cannot be asked for from outside, so answers are marked `unverified` until verified, declared, or told by VLLM_SERVER_DEV_MODE=1, which opens routes that change the server: for closed networks only.
set -eu
if [ $# -eq 0 ]; then
  echo 'usage: vllm-hopper.sh MODEL [PORT [OPTION ...]]' >&2
  exit 2
fi
model=$1 port=${2:-8000} host=${HOST:-127.0.0.1}
shift
if [ $# -gt 0 ]; then shift; fi
export VLLM_BATCH_INVARIANT=1
export PYTHONHASHSEED=0
export VLLM_WORKER_MULTIPROC_METHOD=spawn
export CUBLAS_WORKSPACE_CONFIG=:16:8
exec vllm serve "$model" --host "$host" --port "$port" \
  --seed 0 \
  --no-async-scheduling \
  --generation-config vllm \
  --attention-backend FLASH_ATTN \
  --attention-config.flash_attn_version 2 \
  --max-num-seqs 128 \
  --no-enable-prefix-caching \
  "$@"
