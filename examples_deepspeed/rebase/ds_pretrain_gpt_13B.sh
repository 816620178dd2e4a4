#!/usr/bin/env bash
# A GPT of 13 billion weights: 4 tensor-parallel ranks, 8 stages, ZeRO 1.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=13 MP_SIZE=4 PP_SIZE=8 BATCH_SIZE=2
PROCESSES=64 TEMPLATE=$HERE/ds_config_gpt_TEMPLATE.json
rebase_gpt3 "$@"
