# GRPO with OpenRLHF on one node: four GPUs train, four engines generate up to two batches ahead.
python3 -m openrlhf.cli.train_ppo_ray \
    --actor.num_nodes 1 --actor.num_gpus_per_node 4 \
    --vllm.num_engines 4 --vllm.tensor_parallel_size 1 --vllm.gpu_memory_utilization 0.9 \
    --train.async_enable --train.async_queue_size 2 --train.partial_rollout_enable \
    --actor.model_name_or_path Qwen/Qwen3-8B \
    --ds.zero_stage 3 --ds.packing_samples --actor.gradient_checkpointing_enable \
    --train.dynamic_batch_enable --train.max_tokens_per_gpu 16384 \
    --rollout.batch_size 64 --rollout.n_samples_per_prompt 8 --train.batch_size 512 \
    --data.max_len 5120 --rollout.max_new_tokens 4096 \
    --algo.advantage.estimator group_norm --algo.kl.init_coef 0 \
    --reward.remote_url reward.py --data.prompt_dataset prompts.jsonl
