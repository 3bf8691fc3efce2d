"""DeepSpeed's own layer of experts (deepspeed.moe), as Megatron-DeepSpeed runs it."""
