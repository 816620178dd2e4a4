#!/usr/bin/env bash
# Qwen 2.5 Instruct (0.5B to 7B) on preferences, DPO of all weights: one node, ZeRO 2.
source "$(dirname "$0")/common.sh"

finetune qwen2.5-dpo \
    --bf16 --zero-stage 2 --seq-length 2048 --micro-batch-size 1 --global-batch-size 64 \
    --recompute-activations --epochs 1 --lr 5e-7 --lr-warmup-fraction 0.1 \
    --preference dpo --preference-beta 0.1 "$@"
