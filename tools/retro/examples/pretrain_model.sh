#!/usr/bin/env bash
# Trains a Retro with the neighbours of a project, or resumes. Data, tokenizer, sequence length, seed,
# batch size, samples and evaluations are the project's.
#
#     tools/retro/examples/pretrain_model.sh [FLAG ...]
#
# Settings, from the environment, besides those of examples_deepspeed/common.sh (LAUNCHER, GPUS,
# DRY_RUN):
#
#     RETRO_PROJECT_DIR    folder of the project (default: retro-project); or RETRO_WORKDIR, its older name
#     ADD_RETRIEVER        1 (default), or 0 for a GPT on the same samples
#     CHECKPOINT_PATH      folder of the checkpoints (default: checkpoints/retro, or checkpoints/gpt)
#     PRETRAINED_GPT       checkpoint of a GPT that the training begins with
source "$(dirname "$0")/../../../examples_deepspeed/common.sh"

RETRO_PROJECT_DIR=${RETRO_PROJECT_DIR:-${RETRO_WORKDIR:-retro-project}}
LAUNCHER=${LAUNCHER:-torchrun} GPUS=${GPUS:-8}
FLAGS=() folder=checkpoints/gpt
if [[ ${ADD_RETRIEVER:-1} == 1 ]]; then
    FLAGS+=(--retro-add-retriever --retro-num-neighbors 2) folder=checkpoints/retro
fi
folder=${CHECKPOINT_PATH:-$folder}
# The newest checkpoint of this run, once there is one.
if [[ -n ${PRETRAINED_GPT:-} && ! -e $folder/latest ]]; then
    FLAGS+=(--load "$PRETRAINED_GPT" --finetune --no-load-optim)
else
    FLAGS+=(--load "$folder")
fi
start pretrain_retro.py "${FLAGS[@]}" --retro-project-dir "$RETRO_PROJECT_DIR" \
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 --max-position-embeddings 2048 \
    --micro-batch-size 4 --lr 6.0e-4 --min-lr 6.0e-5 --lr-decay-style cosine \
    --lr-warmup-fraction .015 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 \
    --clip-grad 1.0 --bf16 --save "$folder" --save-interval 1000 --log-interval 10 \
    --tensorboard-dir "$folder/tensorboard" "$@"
