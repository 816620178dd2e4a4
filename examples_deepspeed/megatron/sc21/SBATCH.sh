#!/usr/bin/env bash
# Starts what CONFIG.sh has made: a job of slurm on NNODES nodes of 8 GPUs, or without slurm (or in a
# dry run) the processes of this machine. Sourced by run_*.sh.
script=$(realpath "$(dirname "${BASH_SOURCE[0]}")/SRUN.sh")
cd "${MEGATRON_CODE_DIR:-${script%/examples_deepspeed/*}}" || exit
if [[ -n ${DRY_RUN:-} ]] || ! command -v sbatch >/dev/null; then
    exec bash "$script"
fi
mkdir -p logs
where=()
[[ -z ${SLURM_PARTITION:-} ]] || where+=(--partition "$SLURM_PARTITION")
[[ -z ${SLURM_ACCOUNT:-} ]] || where+=(--account "$SLURM_ACCOUNT")
exec sbatch "${where[@]}" --job-name "$JOB_NAME" --nodes "$NNODES" --export ALL "$script"
