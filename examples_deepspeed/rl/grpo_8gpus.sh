#!/usr/bin/env bash
# Qwen 2.5 7B on mathematics with checked answers, GRPO with LoRA: 8 GPUs of a node, ZeRO 1.
# DATA is a file of records such as {"question": "12 + 30?", "answer": "12 + 30 = 42 #### 42"}.
# PRECISION=fp32 computes in float32.
source "$(dirname "$0")/../finetune/common.sh"

precision=("--${PRECISION:-bf16}")
[[ ${PRECISION:-} != fp32 ]] || precision=()
GPUS=${GPUS:-8} finetune qwen2.5-7b-grpo \
    "${precision[@]}" --zero-stage 1 --recompute-activations \
    --lora --lora-rank 32 --lora-alpha 64 \
    --rl grpo --num-generations 8 --max-completion-length 1024 --seq-length 1536 \
    --micro-batch-size 4 --global-batch-size 256 --epochs 1 --lr 1e-5 --lr-warmup-fraction 0.03 \
    --reward-funcs number --log-completions "$@"
