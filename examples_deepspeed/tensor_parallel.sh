#!/usr/bin/env bash
# GPT-2 with 345 million weights, each layer's matrices shared by two processes; ZeRO 1 over the
# replicas of those pairs. On CPU: LAUNCHER=torchrun GPUS=2.
source "$(dirname "$0")/common.sh"

# shellcheck disable=SC2086
pretrain gpt2-345m-tp2 ${MODEL[gpt2-345m]} --tensor-model-parallel-size 2 \
    --deepspeed_config deepspeed_configs/ds_zero1.json --bf16 \
    --micro-batch-size 8 --global-batch-size 512 --train-iters 20000 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 700 \
    --weight-decay 0.1 --adam-beta2 0.95 "$@"
