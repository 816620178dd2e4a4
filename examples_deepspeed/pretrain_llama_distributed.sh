#!/usr/bin/env bash
# Megatron-DeepSpeed's script: a Llama of 1.2 billion weights, 8 processes: 2 tensor-parallel ranks, a
# pipeline of 2 stages, data parallel over 2; bf16, ZeRO 0.
source "$(dirname "$0")/common.sh"
source examples_deepspeed/llama.sh

pretrain_llama --deepspeed-activation-checkpointing "$@"
