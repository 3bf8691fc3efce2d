#!/usr/bin/env bash
# A server as people start it, and the benchmark that goes with it: what `plan import` reads.
set -euo pipefail
TP=${TP:-2}
MODEL=${MODEL:-Qwen/Qwen3-32B}

vllm serve "$MODEL" --tensor-parallel-size "$TP" --max-num-seqs 128 --kv-cache-dtype fp8 --gpu-memory-utilization 0.9 \
    --max-model-len 8k --no-enable-prefix-caching --port 8000 &

vllm bench serve --model "$MODEL" --dataset-name random --random-input-len 1024 --random-output-len 256 \
    --random-range-ratio 0.1 --num-prompts 640 --max-concurrency 64 --ignore-eos --save-result
