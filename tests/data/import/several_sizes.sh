# bash several_sizes.sh SIZE TP
SIZE=$1
TP=$2
case $SIZE in
    8B) LAYERS=32; HIDDEN=4096; HEADS=32; FFN=14336 ;;
    70B) LAYERS=80; HIDDEN=8192; HEADS=64; FFN=28672 ;;
    *) echo "unknown size"; exit 1 ;;
esac
options=" --num-layers ${LAYERS} --hidden-size ${HIDDEN} --num-attention-heads ${HEADS} --ffn-hidden-size ${FFN} \
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --position-embedding-type rope \
    --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16 \
    --seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --tensor-model-parallel-size ${TP} --sequence-parallel \
    --vocab-size 128256 --use-distributed-optimizer --overlap-grad-reduce"
run_cmd="torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py ${options}"
eval ${run_cmd}
