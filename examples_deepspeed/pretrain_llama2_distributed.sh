#!/usr/bin/env bash
# Megatron-DeepSpeed's script: the Llama of pretrain_llama_distributed.sh with grouped queries,
# NUM_KV_HEADS (4). LOG_TO_WANDB=1 reports to Weights & Biases: WANDB_PROJECT, WANDB_EXP_NAME,
# WANDB_SAVE_DIR.
source "$(dirname "$0")/common.sh"
source examples_deepspeed/llama.sh

wandb=()
if [[ ${LOG_TO_WANDB:-0} == 1 ]]; then
    wandb=(--wandb-project "${WANDB_PROJECT:-pretrain-llama2}"
        --wandb-exp-name "${WANDB_EXP_NAME:-exp0}" --wandb-save-dir "${WANDB_SAVE_DIR:-wandb}")
fi
pretrain_llama --num-key-value-heads "${NUM_KV_HEADS:-4}" "${wandb[@]}" "$@"
