#!/usr/bin/env bash
# Qwen 2.5 (0.5B to 7B) on instructions, all weights: one node, ZeRO 2.
source "$(dirname "$0")/common.sh"

finetune qwen2.5-full \
    --bf16 --zero-stage 2 --packing --seq-length 4096 --micro-batch-size 1 \
    --global-batch-size 64 --recompute-activations --epochs 3 --lr 1e-5 --lr-warmup-fraction 0.03 "$@"
