#!/usr/bin/env bash
# GPT-2 of 1558 million weights with samples that grow from 64 to 1024 tokens in 45,000 steps of 4,096.
# CONFIG=baseline trains with 512 whole samples a step on as many tokens.
set -euo pipefail

CONFIG=${CONFIG:-curriculum_fixed_linear}
if [[ $CONFIG == baseline ]]; then
    own=(1.5e-4 512 5000 600000 false 0 0 baseline)
else
    own=(6e-4 4096 1000 75000 true 45000 64 "$CONFIG")
fi
LR=${LR:-${own[0]}}
BSZ=${BSZ:-${own[1]}}
SAVE_INTERVAL=${SAVE_INTERVAL:-${own[2]}}
NUM_ITER=${NUM_ITER:-${own[3]}}
CONFIG_TEMPLATE=${CONFIG_TEMPLATE:-${own[4]}}
CURRICULUM_STEP=${CURRICULUM_STEP:-${own[5]}}
CURRICULUM_MIN=${CURRICULUM_MIN:-${own[6]}}
MODEL_SIZE=${MODEL_SIZE:-1558}
SEQ_LEN=${SEQ_LEN:-1024}
MP_SIZE=${MP_SIZE:-1}
SEED=${SEED:-1234}
NUM_TOKEN=${NUM_TOKEN:-157286400000}
LR_DECAY_TOKEN=${LR_DECAY_TOKEN:-157286400000}
LR_WARMUP_ITER=${LR_WARMUP_ITER:-3000}
TAG=${TAG:-${own[7]}_s${CURRICULUM_MIN}to${SEQ_LEN}_step$CURRICULUM_STEP}

exec bash "$(dirname "$0")/ds_pretrain_gpt2.sh" "$CONFIG" "$TAG" "$MODEL_SIZE" "$LR" "$BSZ" "$SEQ_LEN" \
    "$MP_SIZE" "$SEED" "$SAVE_INTERVAL" "$NUM_ITER" "$NUM_TOKEN" "$LR_DECAY_TOKEN" "$LR_WARMUP_ITER" \
    "$CONFIG_TEMPLATE" "$CURRICULUM_STEP" "$CURRICULUM_MIN" "$@"
