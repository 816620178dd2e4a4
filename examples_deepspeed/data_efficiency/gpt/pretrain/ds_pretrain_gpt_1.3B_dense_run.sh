#!/usr/bin/env bash
# Recipes of ds_pretrain_gpt_1.3B_dense_base_script.sh: ds_pretrain_gpt_1.3B_dense_run.sh RECIPE
# [FLAG ...]. Without a recipe it names them and ends with status 1. INDEX_HOME is the folder that
# ../ds_analyze_gpt_data_reduce.sh has written (vocab_rarity/...); CL_START_SEQLEN and CL_STEPS are the
# first length and the steps of the curricula, LTD_START and LTD_STEP those of the layers that drop tokens.
source "$(dirname "$0")/../../data_efficiency.sh"

block baseline_300B baseline_200B baseline_150B cl_ltd_300B cl_ltd_150B ltd_300B ltd_200B ltd_150B \
    cl_voc_truncate_300B cl_voc_truncate_200B cl_voc_truncate_150B cl_voc_reshape_300B cl_voc_300B \
    cl_truncate_300B cl_reshape_300B -- "$@"
# Billions of tokens: the rate grows as they fall, dropping and curriculum become shorter.
case $BLOCK in
    *_300B) lr=2.0e-4 tokens=300 dropped=200000 steps=110000 ;;
    *_200B) lr=3.0e-4 tokens=200 dropped=133333 steps=73000 ;;
    *_150B) lr=4.0e-4 tokens=150 dropped=100000 steps=55000 ;;
esac
defaults SEQ_LEN=2048 CL_START_SEQLEN=80 CL_STEPS="$steps" LTD_START=128 LTD_STEP="$dropped"
index=${INDEX_HOME:-$HERE/../output/analysis_pile_gpt_1epoch}/vocab_rarity/vocab_rarity_index_to
# shellcheck disable=SC2153
voc=(voc "${index}_sample_percentile_merged" "${index}_metric" percentile schedule_based 1 100 "$CL_STEPS" 1 2)
truncate=(seqlen_truncate dummy dummy value single_cluster "$CL_START_SEQLEN" "$SEQ_LEN" "$CL_STEPS" 8 1)
reshape=(seqlen_reshape dummy dummy value single_cluster "$CL_START_SEQLEN" "$SEQ_LEN" "$CL_STEPS" 8 1)
ltd=(true "$LTD_START" "$LTD_STEP") full=(false "$SEQ_LEN" 1)

case ${BLOCK%_*} in
    baseline) arguments=() ;;
    ltd) arguments=("${ltd[@]}") ;;
    cl_ltd) arguments=("${ltd[@]}" true 2 "${voc[@]}" "${truncate[@]}") ;;
    cl_voc_truncate) arguments=("${full[@]}" true 2 "${voc[@]}" "${truncate[@]}") ;;
    cl_voc_reshape) arguments=("${full[@]}" true 2 "${voc[@]}" "${reshape[@]}") ;;
    cl_voc) arguments=("${full[@]}" true 1 "${voc[@]}") ;;
    cl_truncate) arguments=("${full[@]}" true 1 "${truncate[@]}") ;;
    cl_reshape) arguments=("${full[@]}" true 1 "${reshape[@]}") ;;
esac
exec bash "$HERE/ds_pretrain_gpt_1.3B_dense_base_script.sh" "$lr" "$tokens" "${arguments[@]}" "${REST[@]}"
