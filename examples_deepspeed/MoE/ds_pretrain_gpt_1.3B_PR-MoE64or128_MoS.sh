#!/usr/bin/env bash
# A mixture of students: 21 layers taught by the 24 of ds_pretrain_gpt_1.3B_PR-MoE64or128.sh, whose
# checkpoints CHECKPOINT_PATH_TEACHER names.
source "$(dirname "$0")/../megatron_deepspeed.sh"

waits_for "experts (--num-experts above 1)"
FLAG_OF[NUM_LAYERS]=--num-layers-teacher FLAG_OF[STUDENT_LAYERS]=--num-layers
defaults MODEL_SIZE=1.3 LR=1.2e-4 MIN_LR=1.0e-6 BATCH_SIZE=4 \
    INIT_STD=0.014 LR_DECAY_TOKENS=300000000000 SAVE_INTERVAL=10000 NO_PP=true \
    EP_SIZE="64 64 64 64 64 64 64 64 128 128" EP_SIZE_TEACHER="64 64 64 64 64 64 64 64 64 64 128 128" \
    STUDENT_LAYERS=21 KD_BETA_CE=1 CHECKPOINT_PATH_TEACHER=teacher ZERO_STAGE=2
read -ra experts <<<"$EP_SIZE_TEACHER"
gpt3_shape
PROCESSES=128 LENGTH=--train-iters SUFFIX=-mos TEMPLATE=$HERE/ds_config_gpt_Zero2_TEMPLATE.json
moe_gpt3 --mlp-type residual --num-layers "$STUDENT_LAYERS" --mos --kd-beta-ce "$KD_BETA_CE" \
    --num-layers-teacher "$NUM_LAYERS" --num-experts-teacher "${experts[@]}" \
    --hidden-size-teacher "$HIDDEN_SIZE" --num-attention-heads-teacher "$NUM_ATTN_HEADS" \
    --load-teacher "$CHECKPOINT_PATH_TEACHER" "$@"
