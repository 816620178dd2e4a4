#!/usr/bin/env bash
# A GPT of 1.3 billion weights in a pipeline of 8 stages that computes gradients of weights where a stage
# would wait (ZB-H1).
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=1.3 PP_SIZE=8 ZERO_STAGE=0 GLOBAL_BATCH_SIZE=16 BATCH_SIZE=1 LOG_INTERVAL=1 \
    EVAL_ITERS=10100 EVAL_INTERVAL=10100 SAVE_INTERVAL=10100 ACTIVATION_CHECKPOINT=false
DATA=my-gpt2_text_document TEMPLATE=examples_deepspeed/rebase/ds_config_gpt_TEMPLATE.json
rebase_gpt3 --enable-zbh1-pipeline --enable-zbh1-exact-semantics "$@"
