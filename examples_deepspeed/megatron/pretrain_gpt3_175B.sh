#!/usr/bin/env bash
# Megatron-LM's script: GPT-3 with 175 billion weights on a slurm cluster, 128 nodes of 8 GPUs. From
# the checkout, with DATA_PATH="0.2 A 0.3 B 0.5 C" or DATASET_1 DATASET_2 DATASET_3, VOCAB_FILE,
# MERGE_FILE, CHECKPOINT_PATH:
#
#     sbatch examples_deepspeed/megatron/pretrain_gpt3_175B.sh
#     CONTAINER_IMAGE=image.sqsh CONTAINER_MOUNTS=/data:/data \
#         sbatch examples_deepspeed/megatron/pretrain_gpt3_175B.sh      # in a container, by pyxis
#
#SBATCH --job-name=megatron_gpt3_175b
#SBATCH --nodes=128
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --output=slurm-%j.log
if [[ -n ${SLURM_JOB_ID:-} && -z ${SLURM_STEP_ID:-} && ${DOCTOR:-} != only ]]; then # steps run this file
    exec bash examples_deepspeed/slurm/pretrain.sbatch pretrain_gpt3_175B.sh "$@"
fi
here=$(dirname "$0")/$(dirname "$(readlink "$0" || echo .)") # the script may be a link to this one
source "$here/megatron.sh"

if [[ -z ${DATA_PATH:-} && -n ${DATASET_1:-} && -n ${DATASET_2:-} && -n ${DATASET_3:-} ]]; then
    DATA_PATH="0.2 $DATASET_1 0.3 $DATASET_2 0.5 $DATASET_3"
fi
# shellcheck disable=SC2086
megatron_lm pretrain_gpt.py ${MODEL[gpt3-175b]} --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 \
    --split 98,2,0 --micro-batch-size 1 --global-batch-size 1536 \
    --rampup-batch-size 16 16 5859375 --train-samples 146484375 --lr-decay-samples 126953125 \
    --lr-warmup-samples 183105 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine \
    --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 \
    --checkpoint-activations --log-interval 10 --save-interval 1000 --eval-interval 1000 --eval-iters 40 "$@"
