#!/usr/bin/env bash
# Qwen 3 30B-A3B on code with unit tests, GSPO of all weights: several nodes of 8 GPUs
# (HOSTFILE=..., or LAUNCHER=torchrun with NODES, NODE_RANK and MASTER_ADDR). Tensor parallel within
# a node, data parallel over the rest, ZeRO 1. DATA has the columns prompt and tests.
source "$(dirname "$0")/../finetune/common.sh"

GPUS=${GPUS:-8} finetune qwen3-gspo \
    --bf16 --zero-stage 1 --tensor-model-parallel-size "${TP:-8}" --sequence-parallel \
    --recompute-activations --rl gspo --num-generations 16 --max-completion-length 3072 \
    --seq-length 4096 --micro-batch-size 1 --global-batch-size 512 --rollout-batch-size 128 \
    --lr 1e-6 --reward-funcs code --reward-workers 8 --reward-timeout 20 --log-completions "$@"
