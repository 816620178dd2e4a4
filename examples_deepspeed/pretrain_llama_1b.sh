#!/usr/bin/env bash
# A Llama with 1.1 billion weights on 20 billion tokens: one node or several, ZeRO 2.
source "$(dirname "$0")/common.sh"

# shellcheck disable=SC2086
pretrain llama-1b ${MODEL[llama-1b]} \
    --deepspeed_config deepspeed_configs/ds_zero2.json --bf16 \
    --micro-batch-size 4 --global-batch-size 512 --train-iters 20000 \
    --lr 4e-4 --min-lr 4e-5 --lr-decay-style cosine --lr-warmup-iters 1000 \
    --weight-decay 0.1 --adam-beta2 0.95 "$@"
