FSDP=${FSDP:-1}
ARGS=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
    --qk-layernorm --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --num-experts 256 --moe-layer-freq "[0]*3+[1]*58" --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-dtype fp32 --mtp-num-layers 1
    --tokenizer-model deepseek-ai/DeepSeek-V3 --seq-length 4096 --micro-batch-size 1 --global-batch-size 2048
    --expert-model-parallel-size ${EP:-8} --expert-tensor-parallel-size 1 --hidden-dropout 0 --attention-dropout 0 --bf16
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --grad-reduce-in-bf16
)
if [ "$FSDP" = 1 ]; then
    ARGS=("${ARGS[@]}" --use-megatron-fsdp --data-parallel-sharding-strategy ${STRATEGY:-optim_grads_params})
fi
srun --gpus-per-node 8 -N $NODES bash -c "python pretrain_gpt.py ${ARGS[*]}"
