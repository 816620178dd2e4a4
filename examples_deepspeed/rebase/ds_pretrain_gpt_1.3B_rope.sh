#!/usr/bin/env bash
# The same with rotary positions in a quarter of each head, 4 tensor-parallel ranks and 8 stages.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=1.3 MP_SIZE=4 PP_SIZE=8 BATCH_SIZE=2
PROCESSES=64 TEMPLATE=$HERE/ds_config_gpt_TEMPLATE.json
rebase_gpt3 --use-rotary-position-embeddings --rotary-percent 0.25 "$@"
