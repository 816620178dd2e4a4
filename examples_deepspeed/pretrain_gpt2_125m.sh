#!/usr/bin/env bash
# GPT-2 with 125 million weights on 10 billion tokens: one node, ZeRO 1.
source "$(dirname "$0")/common.sh"

# shellcheck disable=SC2086
pretrain gpt2-125m ${MODEL[gpt2-125m]} \
    --deepspeed_config deepspeed_configs/ds_zero1.json --bf16 \
    --micro-batch-size 16 --global-batch-size 512 --train-iters 20000 \
    --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --lr-warmup-iters 700 \
    --weight-decay 0.1 --adam-beta2 0.95 "$@"
