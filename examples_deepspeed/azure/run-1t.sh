#!/usr/bin/env bash
# A GPT of a trillion weights at ZeRO 3 with the optimizer in main memory.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults NLAYERS=128 HIDDEN=25600 HEADS=160 MICRO_BATCH=1 ITERATIONS=1000 \
    OFFLOAD_DEVICE=cpu CPU_OPTIM=--cpu-optimizer
azure_gpt 1 "$@"
