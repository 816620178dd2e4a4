#!/usr/bin/env bash
# Llama 3 8B Instruct on preferences, DPO with LoRA: one node of 8 GPUs, ZeRO 1.
source "$(dirname "$0")/common.sh"

small=(--seq-length 256 --micro-batch-size 2 --global-batch-size 8
    --epochs 4 --lr 1e-3 --log-interval 1 --num-workers 0)
recipe_of finetune/llama3_dpo.sh "$@"
