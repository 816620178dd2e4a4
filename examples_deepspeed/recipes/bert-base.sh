#!/usr/bin/env bash
# BERT of 110 million weights, a million steps of 256 samples as published: one node of 8 GPUs, ZeRO 1.
source "$(dirname "$0")/common.sh"

small=(--seq-length 64 --max-position-embeddings 64)
# shellcheck disable=SC2086
recipe bert bert-base ${MODEL[bert-base]} --bf16 --zero-stage 1 \
    --micro-batch-size 32 --global-batch-size 256 --train-iters 1000000 --lr 1e-4 --min-lr 0 \
    --lr-decay-style linear --lr-warmup-iters 10000 --weight-decay 0.01 --clip-grad 1.0 -- "$@"
