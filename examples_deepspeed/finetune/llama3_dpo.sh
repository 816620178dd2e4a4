#!/usr/bin/env bash
# Llama 3 8B Instruct on preferences, DPO with LoRA: data parallel, ZeRO 1.
source "$(dirname "$0")/common.sh"

finetune llama3-dpo \
    --bf16 --zero-stage 1 --seq-length 2048 --micro-batch-size 1 --global-batch-size 16 \
    --recompute-activations --epochs 1 --lr 5e-6 --lr-warmup-fraction 0.1 \
    --preference dpo --preference-beta 0.1 --lora --lora-rank 16 --lora-alpha 32 "$@"
