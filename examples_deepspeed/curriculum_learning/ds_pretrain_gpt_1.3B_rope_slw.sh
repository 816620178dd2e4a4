#!/usr/bin/env bash
# A GPT of 1.3 billion weights with rotary positions, 4 tensor-parallel ranks and 8 stages, whose samples
# grow from 64 to 2048 tokens within the first third of the warm-up.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=1.3 MP_SIZE=4 PP_SIZE=8 BATCH_SIZE=2
rotary_growing_gpt3 "$@"
