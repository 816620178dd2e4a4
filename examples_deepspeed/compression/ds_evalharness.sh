#!/usr/bin/env bash
# Zero-shot accuracy on LAMBADA and perplexity of WikiText of a trained model, whose checkpoint has its
# sizes.
source "$(dirname "$0")/../megatron_deepspeed.sh"

evaluate_harness lambada,wikitext "$@"
