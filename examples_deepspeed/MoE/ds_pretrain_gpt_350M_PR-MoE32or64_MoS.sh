#!/usr/bin/env bash
# A mixture of students: 21 layers taught by the 24 of ds_pretrain_gpt_350M_PR-MoE32or64.sh, whose
# checkpoints CHECKPOINT_PATH_TEACHER names.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=0.35 LR=3.0e-4 BATCH_SIZE=4 \
    EP_SIZE="32 32 32 32 32 32 32 32 64 64" EP_SIZE_TEACHER="32 32 32 32 32 32 32 32 32 32 64 64"
PROCESSES=64 TEMPLATE=$HERE/ds_config_gpt_TEMPLATE.json
student_gpt3 "$@"
