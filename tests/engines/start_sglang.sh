#!/bin/bash
# One real SGLang server on the CPU, on loopback, in the foreground:
#   [DET=1] start_sglang.sh PYTHON MODEL_FOLDER PORT [SGLang options ...]
# PYTHON is the one that install.py made. DET=1 starts it in deterministic mode; in the other SGLang ignores seeds.
# Ready when GET /ready answers 200, after 12 to 20 s. Reward models: --is-embedding --disable-radix-cache.
set -eu
python=$1 model=$2 port=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd)
if [ "${DET:-0}" = 1 ]; then set -- --enable-deterministic-inference "$@"; fi
export SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCH_COMPILE_DISABLE=1

# Without --sleep-on-idle its scheduler takes a whole core while nothing runs.
exec "$python" "$here/sglang_cpu/launch.py" \
  --host 127.0.0.1 --port "$port" \
  --model-path "$model" --served-model-name "$(basename "$model")" \
  --device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch --grammar-backend none \
  --disable-cuda-graph --disable-overlap-schedule --skip-server-warmup --sleep-on-idle \
  --max-total-tokens 16384 --max-running-requests 16 --mem-fraction-static 0.5 --context-length 2048 "$@"
