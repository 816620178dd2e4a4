#!/bin/bash
EP_SIZE=64
ds_json=ds_moe.json
cat <<'EOF' > ds_moe.json
{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}, "bf16": {"enabled": true}, "gradient_clipping": 1.0, "steps_per_print": 1, "csv_monitor": {"enabled": false}}
EOF
for i in 1 2 3; do
  echo $i
done
deepspeed --num_nodes 8 --num_gpus 8 pretrain_gpt.py \
  --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 \
  --num-experts ${EP_SIZE} --topk 1 --expert-interval 2 --moe-expert-parallel-size $EP_SIZE --moe-loss-coeff 0.01 \
  --moe-train-capacity-factor 1.0 --moe-eval-capacity-factor 1.0 --moe-min-capacity 4 --create-moe-param-group \
  --micro-batch-size 1 --global-batch-size 256 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --train-iters 1000 \
  --vocab-file vocab.json --merge-file merges.txt --data-path d_text_document --bf16 --disable-moe-token-dropping \
  --deepspeed --deepspeed_config $ds_json --no-pipeline-parallel --use-tutel --mlp-type residual
