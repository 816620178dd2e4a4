#!/usr/bin/env bash
# Figure 16: the micro batch size of a GPT of 91 billion weights.
# MBS is 1 (default), 2, 4 or 8; GBS 128 (default) or 512.
folder=$(realpath "$(dirname "$0")")
MBS=${MBS:-1} GBS=${GBS:-128}

TP=${TP:-8} PP=${PP:-8} NLS=${NLS:-32} HS=${HS:-15360} NAH=${NAH:-128} DDP=${DDP:-local}
NNODES=${NNODES:-8}
MEGATRON_EXTRA_PARAMS=${MEGATRON_EXTRA_PARAMS---recompute-granularity full --recompute-method uniform}
JOB_NAME=${JOB_NAME:-results_figure_16_microbatch_size_${MBS}_batch_size_$GBS}

source "$folder/CONFIG.sh"
source "$folder/SBATCH.sh"
