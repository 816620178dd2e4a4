#!/usr/bin/env bash
# A mixture of students: 21 layers taught by the 24 of ds_pretrain_gpt_350M_PR-MoE32or64.sh, whose
# checkpoints CHECKPOINT_PATH_TEACHER names.
source "$(dirname "$0")/../megatron_deepspeed.sh"

waits_for "experts (--num-experts above 1)"
FLAG_OF[NUM_LAYERS]=--num-layers-teacher FLAG_OF[STUDENT_LAYERS]=--num-layers
defaults MODEL_SIZE=0.35 LR=3.0e-4 MIN_LR=1.0e-6 BATCH_SIZE=4 \
    INIT_STD=0.014 LR_DECAY_TOKENS=300000000000 SAVE_INTERVAL=10000 NO_PP=true \
    EP_SIZE="32 32 32 32 32 32 32 32 64 64" EP_SIZE_TEACHER="32 32 32 32 32 32 32 32 32 32 64 64" \
    STUDENT_LAYERS=21 KD_BETA_CE=1 CHECKPOINT_PATH_TEACHER=teacher
read -ra experts <<<"$EP_SIZE_TEACHER"
gpt3_shape
PROCESSES=64 LENGTH=--train-iters SUFFIX=-mos TEMPLATE=$HERE/ds_config_gpt_TEMPLATE.json
moe_gpt3 --mlp-type residual --num-layers "$STUDENT_LAYERS" --mos --kd-beta-ce "$KD_BETA_CE" \
    --num-layers-teacher "$NUM_LAYERS" --num-experts-teacher "${experts[@]}" \
    --hidden-size-teacher "$HIDDEN_SIZE" --num-attention-heads-teacher "$NUM_ATTN_HEADS" \
    --load-teacher "$CHECKPOINT_PATH_TEACHER" "$@"
