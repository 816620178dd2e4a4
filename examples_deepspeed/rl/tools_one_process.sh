#!/usr/bin/env bash
# Qwen 2.5 0.5B Instruct with a calculator that it calls, GRPO with LoRA: one process. DATA is a
# file of records such as {"question": "What is 12 * 30?", "answer": 360}.
source "$(dirname "$0")/../finetune/common.sh"

LAUNCHER=${LAUNCHER:-python} finetune qwen2.5-tools \
    --rl grpo --num-generations 8 --max-completion-length 384 --seq-length 1024 \
    --micro-batch-size 8 --global-batch-size 64 --lora --lora-rank 16 --lora-alpha 32 --lr 1e-5 \
    --environment examples_deepspeed/rl/environments.py:Calculator --max-turns 4 \
    --log-completions "$@"
