#!/usr/bin/env bash
# Figure 18: a GPT of 175 billion weights with scatter-gather communication and without. This
# trainer accepts the choice and always sends whole activations, so both give the same times.
# SCATTER_GATHER is YES (default) or NO; GBS 12 (default), 24 ... 60.
folder=$(realpath "$(dirname "$0")")
SCATTER_GATHER=${SCATTER_GATHER:-YES} GBS=${GBS:-12}

case $SCATTER_GATHER in
    YES) scatter="" ;;
    NO) scatter="--no-scatter-gather-tensors-in-pipeline" ;;
    *)
        echo "${0##*/}: error: SCATTER_GATHER $SCATTER_GATHER: YES or NO" >&2
        exit 2
        ;;
esac
TP=${TP:-8} PP=${PP:-12} MBS=${MBS:-1} NLS=${NLS:-96} HS=${HS:-12288} NAH=${NAH:-96} DDP=${DDP:-local}
NNODES=${NNODES:-12}
MEGATRON_EXTRA_PARAMS=${MEGATRON_EXTRA_PARAMS---recompute-granularity full --recompute-method uniform \
    --num-layers-per-virtual-pipeline-stage 2 $scatter}
JOB_NAME=${JOB_NAME:-results_figure_18_scatter_gather_${SCATTER_GATHER}_batch_size_$GBS}

source "$folder/CONFIG.sh"
source "$folder/SBATCH.sh"
