#!/usr/bin/env bash
# Figure 12: a GPT of 175 billion weights with the interleaved schedule and without.
# INTERLEAVED is YES (default) or NO; GBS 12 (default), 24 ... 60.
folder=$(realpath "$(dirname "$0")")
INTERLEAVED=${INTERLEAVED:-YES} GBS=${GBS:-12}

case $INTERLEAVED in
    YES) schedule="--num-layers-per-virtual-pipeline-stage 2" ;;
    NO) schedule="" ;;
    *)
        echo "${0##*/}: error: INTERLEAVED $INTERLEAVED: YES or NO" >&2
        exit 2
        ;;
esac
TP=${TP:-8} PP=${PP:-12} MBS=${MBS:-1} NLS=${NLS:-96} HS=${HS:-12288} NAH=${NAH:-96} DDP=${DDP:-local}
NNODES=${NNODES:-12}
MEGATRON_EXTRA_PARAMS=${MEGATRON_EXTRA_PARAMS---recompute-granularity full --recompute-method uniform $schedule}
JOB_NAME=${JOB_NAME:-results_figure_12_interleaved_${INTERLEAVED}_batch_size_$GBS}

source "$folder/CONFIG.sh"
source "$folder/SBATCH.sh"
