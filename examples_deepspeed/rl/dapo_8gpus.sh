#!/usr/bin/env bash
# Qwen 3 8B on mathematics with checked answers, DAPO of all weights: 8 GPUs of a node, ZeRO 3.
source "$(dirname "$0")/../finetune/common.sh"

GPUS=${GPUS:-8} finetune qwen3-dapo \
    --bf16 --zero-stage 3 --recompute-activations \
    --rl dapo --num-generations 16 --max-completion-length 3072 --seq-length 4096 \
    --micro-batch-size 2 --global-batch-size 512 --rollout-batch-size 128 --lr 1e-6 \
    --rl-curriculum success --reward-funcs number think_format_reward --reward-weights 1.0 0.1 \
    --log-completions "$@"
