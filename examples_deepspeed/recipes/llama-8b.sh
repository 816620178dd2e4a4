#!/usr/bin/env bash
# A Llama of 8 billion weights on 100 billion tokens: two nodes of 8 GPUs, ZeRO 2. For few GPUs there
# is ../zero3_offload.sh.
source "$(dirname "$0")/common.sh"

small=(--seq-length 64 --max-position-embeddings 64 --ffn-hidden-size 176 --num-query-groups 2)
# shellcheck disable=SC2086
recipe gpt llama-8b ${MODEL[llama-8b]} --bf16 --zero-stage 2 \
    --recompute-granularity full --recompute-method uniform \
    --micro-batch-size 1 --global-batch-size 512 --train-iters 24000 --lr 3e-4 --min-lr 3e-5 \
    --lr-decay-style cosine --lr-warmup-iters 2000 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 -- "$@"
