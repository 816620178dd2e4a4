#!/usr/bin/env bash
# Qwen 2.5 7B on mathematics with checked answers, GRPO with LoRA: 8 GPUs of a node, ZeRO 1.
# DATA is a file of records such as {"question": "12 + 30?", "answer": "12 + 30 = 42 #### 42"}.
source "$(dirname "$0")/common.sh"

[[ -z ${SMALL:-} ]] || export PRECISION=fp32 # In bf16 another order of a sum changes draws.
small=(--seq-length 256 --max-completion-length 16 --micro-batch-size 32 --global-batch-size 64
    --epochs 2 --lr 1e-2 --log-interval 1 --num-workers 0
    --reward-funcs examples_deepspeed/rl/rewards.py:early_letters)
recipe_of rl/grpo_8gpus.sh "$@"
