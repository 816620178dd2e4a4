#!/usr/bin/env bash
# Figure 17: a GPT of 145 billion weights with recomputed activations and without.
# ACTIVATION_RECOMPUTATION is YES (default) or NO; GBS 1 (default), 2, 4 ... 256.
folder=$(realpath "$(dirname "$0")")
ACTIVATION_RECOMPUTATION=${ACTIVATION_RECOMPUTATION:-YES} GBS=${GBS:-1}

case $ACTIVATION_RECOMPUTATION in
    YES) recompute="--recompute-granularity full --recompute-method uniform" ;;
    NO) recompute="" ;;
    *)
        echo "${0##*/}: error: ACTIVATION_RECOMPUTATION $ACTIVATION_RECOMPUTATION: YES or NO" >&2
        exit 2
        ;;
esac
TP=${TP:-8} PP=${PP:-16} MBS=${MBS:-1} NLS=${NLS:-80} HS=${HS:-12288} NAH=${NAH:-96} DDP=${DDP:-local}
NNODES=${NNODES:-16}
MEGATRON_EXTRA_PARAMS=${MEGATRON_EXTRA_PARAMS-$recompute}
JOB_NAME=${JOB_NAME:-results_figure_17_activation_recomputation_${ACTIVATION_RECOMPUTATION}_batch_size_$GBS}

source "$folder/CONFIG.sh"
source "$folder/SBATCH.sh"
