#!/usr/bin/env bash
# Starts what CONFIG.sh has made: a job of slurm on NNODES nodes of 8 GPUs, or without slurm (or in a
# dry run) the processes of this machine. run_*.sh source it.
script=$(realpath "$(dirname "${BASH_SOURCE[0]}")/SRUN.sh")
cd "${MEGATRON_CODE_DIR:-${script%/examples_deepspeed/*}}" || exit
if [[ -n ${DRY_RUN:-} ]] || ! command -v sbatch >/dev/null; then
    [[ ${BASH_SOURCE[0]} == "$0" ]] || set -- # CONFIG.sh has these flags
    exec bash "$script" "$@"
fi
mkdir -p logs
where=()
[[ -z ${SLURM_PARTITION:-} ]] || where+=(--partition "$SLURM_PARTITION")
[[ -z ${SLURM_ACCOUNT:-} ]] || where+=(--account "$SLURM_ACCOUNT")
exec sbatch "${where[@]}" --job-name "${JOB_NAME:-sc21}" --nodes "${NNODES:-1}" --export ALL "$script"
