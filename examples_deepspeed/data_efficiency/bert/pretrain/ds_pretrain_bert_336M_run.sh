#!/usr/bin/env bash
# Recipes of ds_pretrain_bert_336M_base_script.sh: ds_pretrain_bert_336M_run.sh RECIPE [FLAG ...].
# Without a recipe it names them and ends with status 1. INDEX_HOME is the folder that
# ../ds_analyze_bert_data_reduce.sh has written (vocab_rarity/..., seqlen/..., seqlen_vocab_rarity/...);
# CL_START_SEQLEN and CL_STEPS_IN_MILLION are the first length and the steps of the curricula,
# LTD_START and LTD_STEP_IN_MILLION those of the layers that drop tokens.
source "$(dirname "$0")/../../data_efficiency.sh"

block baseline_1049B baseline_703B baseline_524B cl_ltd_1049B cl_ltd_524B ltd_1049B ltd_703B ltd_524B \
    cl_voc_truncate_1049B cl_voc_truncate_703B cl_voc_truncate_524B cl_seqlenvocabrarity_1049B \
    cl_voc_1049B cl_truncate_1049B cl_seqlen_1049B -- "$@"
# Millions of steps: the rate grows as they fall, dropping and curriculum become shorter.
case $BLOCK in
    *_1049B) lr=1e-4 million=2 steps=96e-2 ;;
    *_703B) lr=1.5e-4 million=134e-2 steps=64e-2 ;;
    *_524B) lr=2e-4 million=1 steps=48e-2 ;;
esac
defaults SEQ_LEN=512 CL_START_SEQLEN=128 CL_STEPS_IN_MILLION="$steps" LTD_START=128 \
    LTD_STEP_IN_MILLION="$million"
home=${INDEX_HOME:-$HERE/../output/analysis_pile_bert_5epoch}
index() { # NAME METRIC CLUSTERING MULTIPLE
    printf '%s\n' "$1" "$home/$2/$2_index_to_sample_percentile_merged" "$home/$2/$2_index_to_metric" \
        percentile "$3" 5 100 "$CL_STEPS_IN_MILLION" "$4" 2
}
mapfile -t voc < <(index voc vocab_rarity schedule_based 1)
mapfile -t rare < <(index seqlenvocabrarity seqlen_vocab_rarity schedule_based 1)
mapfile -t long < <(index seqlen seqlen single_cluster 8)
truncate=(seqlen_truncate dummy dummy value single_cluster "$CL_START_SEQLEN" "$SEQ_LEN" "$CL_STEPS_IN_MILLION" 8 1)
ltd=(true "$LTD_START" "$LTD_STEP_IN_MILLION" 0.1) full=(false "$SEQ_LEN" 1 0.1)

case ${BLOCK%_*} in
    baseline) arguments=() ;;
    ltd) arguments=("${ltd[@]}") ;;
    cl_ltd) arguments=("${ltd[@]}" true 2 "${voc[@]}" "${truncate[@]}") ;;
    cl_voc_truncate) arguments=("${full[@]}" true 2 "${voc[@]}" "${truncate[@]}") ;;
    cl_seqlenvocabrarity) arguments=("${full[@]}" true 1 "${rare[@]}") ;;
    cl_voc) arguments=("${full[@]}" true 1 "${voc[@]}") ;;
    cl_truncate) arguments=("${full[@]}" true 1 "${truncate[@]}") ;;
    cl_seqlen) arguments=("${full[@]}" true 1 "${long[@]}") ;;
esac
exec bash "$HERE/ds_pretrain_bert_336M_base_script.sh" "$lr" "$million" "${arguments[@]}" "${REST[@]}"
