#!/usr/bin/env bash
# A Mixtral of 8 experts and 47 billion weights, of which a token uses 13, on 100 billion tokens: eight
# nodes of 8 GPUs that share the experts, ZeRO 1.
source "$(dirname "$0")/common.sh"

small=(--seq-length 64 --max-position-embeddings 64 --ffn-hidden-size 176 --num-query-groups 2
    --expert-model-parallel-size 2)
# shellcheck disable=SC2086
recipe gpt mixtral ${MODEL[mixtral-8x7b]} --expert-model-parallel-size 8 \
    --moe-aux-loss-coeff 0.02 --moe-router-dtype fp32 --bf16 --zero-stage 1 \
    --recompute-granularity full --recompute-method uniform \
    --micro-batch-size 1 --global-batch-size 1024 --train-iters 24000 --lr 2e-4 --min-lr 2e-5 \
    --lr-decay-style cosine --lr-warmup-iters 2000 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 -- "$@"
