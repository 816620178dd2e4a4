#!/usr/bin/env bash
# A GPT of 1.3 billion weights: 2 tensor-parallel ranks, no pipeline, ZeRO 0.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=1.3 MP_SIZE=2 NO_PP=true ZERO_STAGE=0 BATCH_SIZE=2
PROCESSES=64 TEMPLATE=$HERE/ds_config_gpt_TEMPLATE.json
rebase_gpt3 "$@"
