#!/usr/bin/env bash
# Gemma 2 or 3 (text) on instructions, LoRA: data parallel, ZeRO 1.
source "$(dirname "$0")/common.sh"

finetune gemma-lora \
    --bf16 --zero-stage 1 --seq-length 2048 --micro-batch-size 1 --global-batch-size 16 \
    --recompute-activations --epochs 3 --lr 1e-4 --lr-warmup-fraction 0.1 \
    --lora --lora-rank 16 --lora-alpha 32 "$@"
