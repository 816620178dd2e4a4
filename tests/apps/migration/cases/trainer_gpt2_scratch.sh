torchrun --nproc_per_node=2 examples/pytorch/language-modeling/run_clm.py \
  --model_type gpt2 --tokenizer_name gpt2 --config_overrides="n_embd=256,n_head=8,n_layer=4,n_positions=512" \
  --dataset_name wikitext --dataset_config_name wikitext-103-raw-v1 --do_train --do_eval --block_size 512 \
  --per_device_train_batch_size 16 --max_steps 1000 --learning_rate 6e-4 --warmup_steps 100 \
  --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{"min_lr_rate": 0.1}' --optim adamw_bnb_8bit \
  --fp16 --seed 1 --output_dir gpt2-small --save_steps 200 --report_to none --dataloader_num_workers 4 --logging_steps 5 \
  --deepspeed ds_z2_warmup.json --label_smoothing_factor 0.1 --group_by_length true
