#!/usr/bin/env bash
# A mixture of students: 21 layers taught by the 24 of ds_pretrain_gpt_1.3B_PR-MoE64or128.sh, whose
# checkpoints CHECKPOINT_PATH_TEACHER names.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=1.3 LR=1.2e-4 BATCH_SIZE=4 ZERO_STAGE=2 \
    EP_SIZE="64 64 64 64 64 64 64 64 128 128" EP_SIZE_TEACHER="64 64 64 64 64 64 64 64 64 64 128 128"
PROCESSES=128 TEMPLATE=$HERE/ds_config_gpt_Zero2_TEMPLATE.json
student_gpt3 "$@"
