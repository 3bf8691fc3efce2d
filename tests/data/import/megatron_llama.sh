#!/bin/bash
# A script of the usual form: variables with defaults, arrays, a branch on the precision.
#SBATCH --job-name=pretrain
#SBATCH --nodes=8
#SBATCH --gpus-per-node=8
TP=${TP:-4}
PP=${PP:-2}
MBS=1
GBS=$((128 * 2))
PRECISION=${1:-"fp8"}
LOGS="logs/$(date +%s)"
LAUNCH=(--nproc_per_node ${GPUS_PER_NODE:-8} --nnodes ${SLURM_NNODES} --rdzv_endpoint "$HEAD:29500")
MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 # 8B
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0.0
    --seq-length 8192 --max-position-embeddings 8192
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B
)
PARALLEL=(--tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --use-distributed-optimizer --overlap-grad-reduce)
if [[ "$PRECISION" == "fp8" ]]; then
    EXTRA="--bf16 --fp8-format hybrid --grad-reduce-in-bf16"
else
    EXTRA="--bf16"
fi
torchrun "${LAUNCH[@]}" pretrain_gpt.py "${MODEL[@]}" "${PARALLEL[@]}" $EXTRA \
    --micro-batch-size $MBS --global-batch-size $GBS --save $LOGS --log-interval 1 $MORE_ARGS
