#!/usr/bin/env bash
# Llama 3 8B on instructions, LoRA on all linear layers: data parallel, ZeRO 1.
source "$(dirname "$0")/common.sh"

finetune llama3-lora \
    --bf16 --zero-stage 1 --packing --seq-length 4096 --micro-batch-size 1 \
    --global-batch-size 16 --recompute-activations --epochs 3 --lr 1e-4 --lr-warmup-fraction 0.1 \
    --lora --lora-rank 16 --lora-alpha 32 --lora-dropout 0.05 "$@"
