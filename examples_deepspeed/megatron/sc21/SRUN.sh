#!/usr/bin/env bash
# The job of SBATCH.sh: pretrain_gpt.py with the flags in MEGATRON_PARAMS, in the current folder.
#SBATCH --time=0:30:00
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --output=logs/%x_%j.log
examples=examples_deepspeed
if [[ -n ${SLURM_JOB_ID:-} && -z ${SLURM_STEP_ID:-} ]]; then # the steps run this file again
    export MAX_REQUEUES=0
    [[ -z ${DOCKER_MOUNT_DIR:-} ]] || export CONTAINER_MOUNTS=$DOCKER_MOUNT_DIR:$DOCKER_MOUNT_DIR
    exec bash $examples/slurm/pretrain.sbatch megatron/sc21/SRUN.sh
fi
if [[ -z ${MEGATRON_PARAMS:-} ]]; then
    echo "SRUN.sh: error: set MEGATRON_PARAMS, or start one of run_*.sh" >&2
    exit 2
fi
# shellcheck source=/dev/null
source $examples/megatron/megatron.sh
if [[ -z ${SLURM_JOB_ID:-} ]]; then
    LAUNCHER=${LAUNCHER:-torchrun} GPUS=${GPUS:-8}
    if [[ -z ${DRY_RUN:-}${MASTER_ADDR:-} ]] && ((NODES > 1)); then
        echo "${JOB_NAME:-sc21}: without slurm and MASTER_ADDR, on this machine instead of $NODES nodes" >&2
        NODES=1
    fi
fi
eval "params=($MEGATRON_PARAMS)"
# shellcheck disable=SC2154 # eval sets it
start pretrain_gpt.py "${params[@]}" "$@"
