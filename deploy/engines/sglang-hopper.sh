#!/bin/sh
# Usage: sglang-hopper.sh MODEL [PORT [OPTION ...]]
# HOST is the address to listen on, 127.0.0.1 where it is not set.
#
# sglang on hopper, from version 0.5.4. Deterministic mode, since 0.5.3 (with --sampling-defaults since 0.5.4), is documented for the backends flashinfer, fa3 and triton: https://docs.sglang.io/advanced_features/deterministic_inference.html
# PYTHONHASHSEED=0
# Python's hash() is the same in every process and run [https://docs.python.org/3/using/cmdline.html#envvar-PYTHONHASHSEED]
# CUBLAS_WORKSPACE_CONFIG=:4096:8
# cuBLAS repeats its sums from run to run [https://docs.nvidia.com/cuda/cublas/#results-reproducibility]
# --enable-deterministic-inference
# kernels whose sums do not depend on the batch; without it seeds are ignored and nothing says so [https://docs.sglang.io/advanced_features/deterministic_inference.html; seen on SGLang 0.5.23]
# --attention-backend fa3
# chosen by name: with another the server does not start [https://github.com/sgl-project/sglang/pull/10651]
# --sampling-backend pytorch
# the one whose noise follows from seed and position [https://docs.sglang.io/advanced_features/deterministic_inference.html]
# --random-seed 0
# what has no seed of its own; the gateway gives each request one [seen on SGLang 0.5.23]
# --sampling-defaults openai
# sampling defaults do not come from a file of the model, whose min_p would end the server [seen on SGLang 0.5.23]
# --enable-metrics
# the gateway reads what is in it [seen on SGLang 0.5.23]
# --disable-radix-cache
# a warm prefix is computed otherwise than a cold one [https://github.com/sgl-project/sglang/issues/34683, https://github.com/sgl-project/sglang/pull/25479; scores: seen on SGLang 0.5.23]
# `detgate verify` tells whether it is so here; a flag is a claim.
# min_p above 0 ends the whole server in this mode: the gateway refuses it.
# Several DP ranks with DP attention were reported to break it (https://github.com/sgl-project/sglang/pull/11023): one rank a replica.
# For long rollouts of mixture-of-experts models some trainers add --disable-overlap-schedule and --disable-cuda-graph.
set -eu
if [ $# -eq 0 ]; then
  echo 'usage: sglang-hopper.sh MODEL [PORT [OPTION ...]]' >&2
  exit 2
fi
model=$1 port=${2:-8000} host=${HOST:-127.0.0.1}
shift
if [ $# -gt 0 ]; then shift; fi
export PYTHONHASHSEED=0
export CUBLAS_WORKSPACE_CONFIG=:4096:8
exec python3 -m sglang.launch_server --model-path "$model" --host "$host" --port "$port" \
  --enable-deterministic-inference \
  --attention-backend fa3 \
  --sampling-backend pytorch \
  --random-seed 0 \
  --sampling-defaults openai \
  --enable-metrics \
  --disable-radix-cache \
  "$@"
