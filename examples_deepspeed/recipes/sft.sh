#!/usr/bin/env bash
# Qwen 2.5 7B on instructions, all weights: one node of 8 GPUs, ZeRO 2.
source "$(dirname "$0")/common.sh"

small=(--seq-length 256 --micro-batch-size 2 --global-batch-size 8
    --epochs 2 --lr 4e-3 --log-interval 1 --num-workers 0)
recipe_of finetune/qwen2.5_full.sh "$@"
