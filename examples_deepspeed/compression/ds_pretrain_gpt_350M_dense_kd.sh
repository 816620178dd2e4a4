#!/usr/bin/env bash
# The dense baseline of the distillation runs. It has no teacher in spite of its name: nothing is
# distilled here.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=0.35 BATCH_SIZE=4 INIT_STD=0.014
PROCESSES=64 TEMPLATE=$HERE/ds_config_gpt_TEMPLATE.json
moe_gpt3 "$@"
