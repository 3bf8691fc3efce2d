from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer

LENGTH = 8192


def llama3_8b() -> Trainer.Config:
    return Trainer.Config(
        hf_assets_path="./assets/hf/Llama-3.1-8B",
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * LENGTH, max_context_length=LENGTH),
        parallelism=ParallelismConfig(),
        activation_checkpoint=SelectiveAC.Config(),
    )


def llama3_8b_wide() -> Trainer.Config:
    config = llama3_8b()
    config.parallelism.tensor_parallel_degree = 2
    config.training.num_tokens_per_train_step = 64 * LENGTH
    return config
