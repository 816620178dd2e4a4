#!/usr/bin/env bash
# Llama 3 8B on instructions, LoRA over 4-bit weights: one GPU, or data parallel.
source "$(dirname "$0")/common.sh"

finetune llama3-qlora \
    --bf16 --zero-stage 1 --seq-length 2048 --micro-batch-size 1 --global-batch-size 16 \
    --recompute-granularity full --recompute-method uniform --epochs 3 --lr 1e-4 \
    --lr-warmup-fraction 0.1 --lora --qlora --lora-rank 16 --lora-alpha 32 "$@"
