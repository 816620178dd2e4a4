#!/usr/bin/env bash
# A Llama with 8 billion weights on few GPUs: ZeRO 3, weights and optimizer state in main memory.
source "$(dirname "$0")/common.sh"

# shellcheck disable=SC2086
pretrain llama-8b ${MODEL[llama-8b]} \
    --deepspeed_config deepspeed_configs/ds_zero3_offload.json --bf16 \
    --recompute-granularity full --recompute-method uniform \
    --micro-batch-size 1 --global-batch-size 64 --train-iters 5000 \
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 200 \
    --weight-decay 0.1 --adam-beta2 0.95 "$@"
