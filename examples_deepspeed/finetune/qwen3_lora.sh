#!/usr/bin/env bash
# Qwen 3 8B on instructions, LoRA: data parallel, ZeRO 1. Its template drops the reasoning of
# earlier answers, so that the loss is on the last one.
source "$(dirname "$0")/common.sh"

finetune qwen3-lora \
    --bf16 --zero-stage 1 --packing --seq-length 4096 --micro-batch-size 1 \
    --global-batch-size 16 --recompute-activations --epochs 3 --lr 1e-4 --lr-warmup-fraction 0.1 \
    --loss-on last --lora --lora-rank 16 --lora-alpha 32 "$@"
