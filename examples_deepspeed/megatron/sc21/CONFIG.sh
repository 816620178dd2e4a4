#!/usr/bin/env bash
# What the scripts of this folder share: the flags of the runs of "Efficient Large-Scale Language
# Model Training on GPU Clusters Using Megatron-LM" (SC21). run_*.sh set TP PP MBS
# GBS NLS HS NAH DDP NNODES MEGATRON_EXTRA_PARAMS JOB_NAME, source this file, then SBATCH.sh.
#
# Settings, from the environment, each of which may also replace a number of run_*.sh:
#
#     MEGATRON_DATA     prefix of the .bin and .idx files, or "WEIGHT PREFIX WEIGHT PREFIX ..."
#     BPE_VOCAB_FILE, BPE_MERGE_FILE    a GPT-2 vocabulary (vocab.json, merges.txt)
#     MEGATRON_CODE_DIR    the checkout (default: that of this file)
#     SLURM_PARTITION, SLURM_ACCOUNT    where sbatch puts the job (default: where slurm does)
#     CONTAINER_IMAGE   an image to run in, by pyxis (default: none; that of 2020 is obsolete)
#     DOCKER_MOUNT_DIR  a folder to mount in it, next to the checkout
source "$(dirname "${BASH_SOURCE[0]}")/../megatron.sh"

for name in TP PP MBS GBS NLS HS NAH DDP NNODES JOB_NAME; do
    [[ -n ${!name:-} ]] || fail "set $name, or start one of run_*.sh"
done
MEGATRON_CODE_DIR=${MEGATRON_CODE_DIR:-$PWD}
DATA_PATH=${MEGATRON_DATA:-${DATA_PATH:-}}
VOCAB_FILE=${BPE_VOCAB_FILE:-${VOCAB_FILE:-}}
MERGE_FILE=${BPE_MERGE_FILE:-${MERGE_FILE:-}}
[[ -n $DATA_PATH ]] || fail "set MEGATRON_DATA to the prefix of the .bin and .idx files"
[[ -n $VOCAB_FILE && -n $MERGE_FILE ]] || fail "set BPE_VOCAB_FILE and BPE_MERGE_FILE"

FLAGS=()
read -ra extra <<<"${MEGATRON_EXTRA_PARAMS:-}"
data
vocabulary gpt
# SRUN.sh reads this; the script's own flags come last, and count.
printf -v MEGATRON_PARAMS '%q ' "${extra[@]}" --tensor-model-parallel-size "$TP" \
    --pipeline-model-parallel-size "$PP" --micro-batch-size "$MBS" --global-batch-size "$GBS" \
    --num-layers "$NLS" --hidden-size "$HS" --num-attention-heads "$NAH" --DDP-impl "$DDP" \
    "${FLAGS[@]}" --log-interval 5 --seq-length 2048 --max-position-embeddings 2048 \
    --train-iters 500 --lr-decay-iters 320 --lr 0.0001 --min-lr 0.00001 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --split 969,30,1 --eval-iters 100 --eval-interval 1000 \
    --clip-grad 1.0 --fp16 --loss-scale 8192 "$@"
export MEGATRON_CODE_DIR MEGATRON_PARAMS NNODES JOB_NAME
[[ ${BASH_SOURCE[0]} != "$0" ]] || echo "$MEGATRON_PARAMS"
