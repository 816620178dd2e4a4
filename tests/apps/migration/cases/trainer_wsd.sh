accelerate launch --num_processes 4 run_clm.py --model_name_or_path ./base --train_file corpus.txt --output_dir o \
  --max_seq_length 1024 --num_train_epochs 1.5 --lr_scheduler_type warmup_stable_decay \
  --lr_scheduler_kwargs '{"num_decay_steps": 100, "min_lr_ratio": 0.1, "decay_type": "linear"}' --warmup_steps 50 --learning_rate 1e-4 \
  --fsdp "full_shard auto_wrap offload" --optim adafactor --save_strategy epoch --eval_strategy epoch --torch_compile --tf32 true --attn_implementation flash_attention_2
