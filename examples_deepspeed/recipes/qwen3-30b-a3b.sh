#!/usr/bin/env bash
# A Qwen3 of 128 experts and 30 billion weights, of which a token uses 3, on 100 billion tokens: four
# nodes of 8 GPUs that share the experts, ZeRO 1.
source "$(dirname "$0")/common.sh"

small=(--seq-length 64 --max-position-embeddings 64 --ffn-hidden-size 176 --num-query-groups 2
    --kv-channels 32 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64
    --expert-model-parallel-size 2)
# shellcheck disable=SC2086
recipe gpt qwen3-30b-a3b ${MODEL[qwen3-30b-a3b]} --expert-model-parallel-size 8 \
    --moe-aux-loss-coeff 0.001 --moe-router-dtype fp32 --bf16 --zero-stage 1 \
    --recompute-granularity full --recompute-method uniform \
    --micro-batch-size 1 --global-batch-size 1024 --train-iters 24000 --lr 3e-4 --min-lr 3e-5 \
    --lr-decay-style cosine --lr-warmup-iters 2000 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 -- "$@"
