#!/usr/bin/env bash
# T5 of 220 million weights, 524,288 steps of 128 samples as published: one node of 8 GPUs, ZeRO 1.
source "$(dirname "$0")/common.sh"

small=(--encoder-seq-length 64 --decoder-seq-length 32 --max-position-embeddings 64
    --kv-channels 16 --ffn-hidden-size 256)
# shellcheck disable=SC2086
recipe t5 t5-base ${MODEL[t5-220m]} --vocab-extra-ids 100 --bf16 --zero-stage 1 \
    --micro-batch-size 16 --global-batch-size 128 --train-iters 524288 --lr 1e-4 --min-lr 1e-5 \
    --lr-decay-style linear --lr-warmup-iters 10000 --weight-decay 0.01 --clip-grad 1.0 -- "$@"
