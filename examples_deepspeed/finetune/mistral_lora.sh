#!/usr/bin/env bash
# Mistral 7B on instructions, LoRA on the attention: data parallel, ZeRO 1.
source "$(dirname "$0")/common.sh"

finetune mistral-lora \
    --bf16 --zero-stage 1 --packing --seq-length 4096 --micro-batch-size 1 \
    --global-batch-size 16 --recompute-activations --epochs 3 --lr 1e-4 --lr-warmup-fraction 0.1 \
    --lora --lora-rank 16 --lora-targets q_proj k_proj v_proj o_proj "$@"
