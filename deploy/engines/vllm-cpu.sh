#!/bin/sh
# Usage: vllm-cpu.sh MODEL [PORT [OPTION ...]]
# HOST is the address to listen on, 127.0.0.1 where it is not set.
#
# vllm on cpu, from version 0.32.0. No batch-invariant mode; one request at a time repeats to the last bit (seen on vLLM 0.32.0 on a CPU)
# PYTHONHASHSEED=0
# Python's hash() is the same in every process and run; block hashes of the prefix cache begin with it [vLLM 0.32.0, vllm/v1/core/kv_cache_utils.py]
# VLLM_WORKER_MULTIPROC_METHOD=spawn
# workers inherit no state but the environment [vLLM 0.32.0, vllm/envs.py]
# OMP_NUM_THREADS=1
# sums are made in one order whatever the machine's load [seen on vLLM 0.32.0 on a CPU]
# VLLM_CPU_OMP_THREADS_BIND=nobind
# the number of threads is the one above, not vLLM's [seen on vLLM 0.32.0 on a CPU]
# --seed 0
# weights of tests and what has no seed of its own; the gateway gives each request one [vLLM 0.32.0, vllm/config/model.py]
# --no-async-scheduling
# scheduling ahead was reported to change answers [https://github.com/vllm-project/vllm/issues/51287]
# --generation-config vllm
# sampling defaults do not come from a file of the model [vLLM 0.32.0, vllm/config/model.py]
# --dtype float32
# bfloat16 on a CPU loses more to the order of sums [seen on vLLM 0.32.0 on a CPU]
# --enforce-eager
# no compiled graphs that differ by batch size [seen on vLLM 0.32.0 on a CPU]
# --no-enable-chunked-prefill
# a seeded prompt prefilled in two parts ends the engine [seen on vLLM 0.32.0 on a CPU]
# --max-num-seqs 1
# nothing else in the batch, whoever asks [seen on vLLM 0.32.0 on a CPU]
# --no-enable-prefix-caching
# a warm prefix is computed in other blocks than a cold one [https://github.com/vllm-project/vllm/issues/42019; scores: seen on vLLM 0.32.0 on a CPU]
# `detgate verify` tells whether it is so here; a flag is a claim.
# Answers change with the batch: give the pool `lane: {scope: replica, limit: 1}`.
# The mode cannot be asked for from outside, so answers are marked `unverified` until verified, declared, or told by VLLM_SERVER_DEV_MODE=1, which opens routes that change the server: for closed networks only.
set -eu
if [ $# -eq 0 ]; then
  echo 'usage: vllm-cpu.sh MODEL [PORT [OPTION ...]]' >&2
  exit 2
fi
model=$1 port=${2:-8000} host=${HOST:-127.0.0.1}
shift
if [ $# -gt 0 ]; then shift; fi
export PYTHONHASHSEED=0
export VLLM_WORKER_MULTIPROC_METHOD=spawn
export OMP_NUM_THREADS=1
export VLLM_CPU_OMP_THREADS_BIND=nobind
exec vllm serve "$model" --host "$host" --port "$port" \
  --seed 0 \
  --no-async-scheduling \
  --generation-config vllm \
  --dtype float32 \
  --enforce-eager \
  --no-enable-chunked-prefill \
  --max-num-seqs 1 \
  --no-enable-prefix-caching \
  "$@"
