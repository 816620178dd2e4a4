#!/usr/bin/env bash
# Llama 2 7B on instructions, all weights: one node, ZeRO 3.
source "$(dirname "$0")/common.sh"

finetune llama2-full \
    --bf16 --zero-stage 3 --packing --seq-length 4096 --micro-batch-size 1 \
    --global-batch-size 64 --recompute-activations --epochs 3 --lr 2e-5 --lr-warmup-fraction 0.03 "$@"
