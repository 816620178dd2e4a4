#!/usr/bin/env bash
# Qwen 2.5 0.5B Instruct on sums with checked answers, GRPO with LoRA: one process, GPU or CPU. DATA
# is a file of records such as {"question": "What is 12 + 30?", "answer": 42}.
source "$(dirname "$0")/../finetune/common.sh"

LAUNCHER=${LAUNCHER:-python} finetune qwen2.5-grpo \
    --rl grpo --num-generations 8 --max-completion-length 256 --seq-length 768 \
    --micro-batch-size 8 --global-batch-size 64 --lora --lora-rank 16 --lora-alpha 32 --lr 1e-5 \
    --reward-funcs number --answer-column answer --log-completions "$@"
