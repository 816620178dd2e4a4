#!/usr/bin/env bash
# GPT-2 of 125 million weights with 8 experts in every second layer, 2 for each token, over as many
# processes as EXPERT_RANKS says; ZeRO 1. On CPU: LAUNCHER=torchrun GPUS=2.
source "$(dirname "$0")/common.sh"

# shellcheck disable=SC2086
pretrain gpt2-125m-experts ${MODEL[gpt2-125m]} --num-experts 8 --moe-layer-freq 2 \
    --moe-router-topk 2 --moe-router-dtype fp32 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 1e-3 \
    --expert-model-parallel-size "${EXPERT_RANKS:-2}" \
    --deepspeed_config deepspeed_configs/ds_zero1.json --bf16 \
    --micro-batch-size 8 --global-batch-size 512 --train-iters 20000 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 700 \
    --weight-decay 0.1 --adam-beta2 0.95 "$@"
