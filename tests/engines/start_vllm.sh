#!/bin/bash
# One real vLLM server on the CPU, on loopback, in the foreground:
#   start_vllm.sh PYTHON MODEL_FOLDER PORT [vLLM options ...]
# PYTHON is the one that install.py made. Ready when GET /health answers 200, after 16 to 27 s. SIGTERM ends it.
# Reward models: --runner pooling. DTYPE (float32) and OMP_NUM_THREADS (1) may be set from outside.
set -eu
python=$1 model=$2 port=$3
shift 3
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} # GiB
export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# A module, not the `vllm` command: that one looks for the metadata of a package "vllm", and ours is called vllm-cpu.
# No chunked prefill: vLLM 0.32.0 dies on the CPU of a seeded request whose prompt is prefilled in two steps.
# Nor VLLM_BATCH_INVARIANT=1, which needs Triton and so kills it here too.
exec "$python" -m vllm.entrypoints.openai.api_server \
  --host 127.0.0.1 --port "$port" \
  --model "$model" --served-model-name "$(basename "$model")" \
  --dtype "${DTYPE:-float32}" --enforce-eager \
  --max-model-len 2048 --max-num-seqs 64 --no-enable-chunked-prefill "$@"
