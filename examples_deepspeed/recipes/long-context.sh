#!/usr/bin/env bash
# A Llama of 8 billion weights with samples of 131,072 tokens on 10 billion tokens: four nodes of 8
# GPUs, groups of 8 of which share each sample, ZeRO 2. LOAD_PATH=FOLDER is a model of a shorter context.
source "$(dirname "$0")/common.sh"

small=(--seq-length 256 --max-position-embeddings 256 --ffn-hidden-size 176 --num-query-groups 2
    --context-parallel-size 2)
# shellcheck disable=SC2086
recipe gpt long-context ${MODEL[llama-8b]} --seq-length 131072 --rotary-base 8000000 \
    --context-parallel-size 8 ${LOAD_PATH:+--pretrained-checkpoint "$LOAD_PATH"} --bf16 --zero-stage 2 \
    --recompute-granularity full --recompute-method uniform \
    --micro-batch-size 1 --global-batch-size 32 --train-iters 2400 --lr 2e-5 --min-lr 2e-6 \
    --lr-decay-style cosine --lr-warmup-iters 100 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 -- "$@"
