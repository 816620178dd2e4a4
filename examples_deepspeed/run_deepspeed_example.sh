#!/usr/bin/env bash
# A GPT of 24 layers of width 512 at ZeRO 2. The batch size is GLOBAL_BATCH in the flags and in the JSON.
source "$(dirname "$0")/megatron_deepspeed.sh"

defaults NLAYERS=24 HIDDEN=512 HEADS=16 SEQ=256 POSITIONS=1024 GLOBAL_BATCH=1024 MICRO_BATCH=4 ZERO_STAGE=2
example_gpt examples_deepspeed/run_deepspeed_example_TEMPLATE.json "$@"
