#!/usr/bin/env bash
# Figure 11: weak scaling of pipeline parallelism, 3 layers a stage.
# PP is 1 (default), 2, 4 or 8; GBS 8 (default) or 128.
folder=$(realpath "$(dirname "$0")")
PP=${PP:-1} GBS=${GBS:-8}

TP=${TP:-8} MBS=${MBS:-1} NLS=${NLS:-$((3 * PP))} HS=${HS:-20480} NAH=${NAH:-128} DDP=${DDP:-local}
NNODES=${NNODES:-$PP}
MEGATRON_EXTRA_PARAMS=${MEGATRON_EXTRA_PARAMS---recompute-granularity full --recompute-method uniform}
JOB_NAME=${JOB_NAME:-results_figure_11_pipeline_parallel_size_${PP}_batch_size_$GBS}

source "$folder/CONFIG.sh"
source "$folder/SBATCH.sh"
