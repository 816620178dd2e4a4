#!/usr/bin/env bash
# A GPT of 1.3 billion weights without DeepSpeed's JSON: 2 tensor-parallel ranks; each layer is
# recomputed in the backward pass by Megatron's flags.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=1.3 MP_SIZE=2 BATCH_SIZE=2 ACTIVATION_CHECKPOINT=false
PROCESSES=64
rebase_gpt3 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "$@"
