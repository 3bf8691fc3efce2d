"""How many bytes a parameter takes, by the precision of the job: trained weights with their states, and a frozen base.

What is trained in mixed precision is a matter of the trainer (``Trainer.stored``). In pure bf16 nothing is: weights, gradients
and moments have the dtype of the parameters, whoever allocates them.  [torch.optim: zeros_like(parameter)]
"""

from planner.trainer import Trainer
from planner.workload import FP8_WEIGHTS, LOW_PRECISIONS, Workload

EIGHT_BIT = 1.0 + 4.0 / 256.0
"""Bytes of a moment in 8 bits: one fp32 scale per block of 256.  [bitsandbytes, optim/optimizer.py: Optimizer2State, blocksize]"""
FACTORED = 0.01
"""Bytes of Adafactor's second moment per parameter: 4 (r + c) of a matrix r x c, 0.01 to 0.001 at 1k to 8k rows.
[Shazeer 2018, arXiv 1804.04235, section 3; torch.optim.Adafactor]"""
PURE_STATES = {
    "adam": 4.0, "adam_bf16": 4.0, "adam_8bit": 2.0 * EIGHT_BIT, "paged_adam": 8.0, "paged_adam_8bit": 2.0 * EIGHT_BIT,
    "adafactor": FACTORED, "lion": 2.0, "muon": 2.0, "sgd": 2.0,
}  # fmt: skip
"""Bytes per parameter of optimizer states in pure bf16. Paged states are those of bitsandbytes, whose 32-bit optimizers keep
fp32 moments of bf16 weights.  [bitsandbytes, optim/optimizer.py: get_state_buffer(p, dtype=torch.float32)]"""
FP8_GATHERED = {"fp8": 1.0, "fp8_block": 1.0, "mxfp8": 2.0}
"""Bytes per parameter in which weights that lie in fp8 are gathered: mxfp8 in bf16, into the gradient buffer, and quantised after.
[megatron/core/distributed, distributed_data_parallel_config.py: reuse_grad_buf_for_mxfp8_param_ag]"""
BOTH_LAYOUTS = 2.0
"""Bytes of such a parameter where it lies: by rows, and by columns for the backward pass. Blackwell needs the second for scales of
blocks alone: counted there too.  [Transformer Engine, Float8Tensor: _data and _transpose; MXFP8Tensor: rowwise and columnwise]"""
NF4_BLOCK, SCALE_BLOCK, NVFP4_BLOCK = 64.0, 256.0, 16.0
MASTER_BYTES = 4.0
"""Of fp32 master weights, which states of trainers count that keep weights in half precision."""
FROZEN_BYTES = {
    "fp32": 4.0,
    "fp8": 1.0,
    "int8": 1.0,
    "nvfp4": BOTH_LAYOUTS * (0.5 + 1.0 / NVFP4_BLOCK),
    "nf4": 0.5 + 4.0 / NF4_BLOCK,
    "nf4_dq": 0.5 + 1.0 / NF4_BLOCK + 4.0 / (NF4_BLOCK * SCALE_BLOCK),
}
"""Bytes per frozen parameter of a linear layer, scales included: nf4 4.5 bits, double quantised 4.127 bits. One scale per
tensor or row is below 0.1 %.  [Dettmers 2023, arXiv 2305.14314, section 3; bitsandbytes, functional.py: quantize_4bit,
blocksize 64, nested blocksize 256]  nvfp4 lies by rows and by columns, 9 bits.  [Transformer Engine, NVFP4Tensor]"""
RUNS_AS_IT_LIES = {"fp8": LOW_PRECISIONS, "nvfp4": ("nvfp4",)}
"""Dtype of a frozen base -> precisions whose products read it as it lies, with no cast and no copy beside it."""


def stored_as(workload: Workload, trainer: Trainer) -> Trainer:
    """The trainer with the bytes per parameter that the precision of the job decides, and the loss that its objective has.

    DPO reads the log probability of every token off all logits, sequence by sequence in half precision: logits 2, log softmax 2,
    its gradient 2, and a copy of that which is as long as the logits 2. Those of the reference
    come and go before the backward pass. TRL before 0.15 takes log softmax of a batch at once, which the policy holds while the
    reference runs, and 0.29 to 1.5 hold logits of both and copies of them until the loss is there (option ``pair_loss``).
    [TRL, dpo_trainer.py: compute_loss; trainer/utils.py: selective_log_softmax]  LLaMA-Factory takes those of a batch at once in
    fp32: while the reference has logits and log softmax, 4 + 4, those of the policy are there.  [train/dpo/trainer.py]  Liger fuses
    the loss of pairs too; a trainer's own fused one, unsloth's, is that of labels alone, and TRL asks its model for all logits.
    """
    fused = trainer.stored.loss == "fused_linear" and "loss" in trainer.choices.options
    if workload.objective == "dpo" and not fused:
        own = max((term.pair_bytes() for term in trainer.terms), default=0.0)
        trainer = trainer.replace(loss="full", logit_bytes=own or trainer.legal.fine_tuning.pair_logits)
    half = workload.lora_rank > 0 and trainer.kernels.half_adapters
    if workload.precision == "fp32" and not half:
        return _in_fp32(trainer)
    if workload.precision != "bf16_true" and not half:
        return trainer
    reduce = min(trainer.traffic.copied("reduce"), 8.0)  # as in bf16: no cast to fp32
    return trainer.replace(
        weight_bytes=2.0, gradient_bytes=2.0, gradient_reduce_bytes=2.0, optimizer_bytes=PURE_STATES,
        bucket_bytes=min(trainer.traffic.bucket_bytes, 2.0), fp16_gradient_bytes=(2.0, 0.0),
        copy_bytes={"reduce": reduce, "accumulate_in_pipeline": min(trainer.traffic.copied("accumulate_in_pipeline"), 6.0)},
    )  # fmt: skip


def _in_fp32(trainer: Trainer) -> Trainer:
    """The weights are their own master weights, and gradients are kept once, in fp32. Twice over it is the same.

    [Megatron-LM, optimizer.py: FP32Optimizer; DeepSpeed, engine.py: _configure_optimizer wraps it in half precision alone]
    """
    stored = trainer.stored
    master = MASTER_BYTES if stored.weight_bytes < MASTER_BYTES else 0.0
    states = {name: max(each - master, 0.0) for name, each in stored.optimizer_bytes.items()}
    return trainer.replace(
        weight_bytes=max(stored.weight_bytes, MASTER_BYTES), gradient_bytes=4.0, gradient_reduce_bytes=4.0, optimizer_bytes=states,
    )  # fmt: skip


def frozen_other(workload: Workload) -> float:
    """Bytes per parameter of a frozen base that is no linear layer: embedding, head, norms."""
    return 4.0 if workload.frozen_weights == "fp32" else workload.element


def in_fewer_bits(workload: Workload) -> bool:
    """Linear layers of a frozen base lie in fewer bits than they are multiplied in."""
    return workload.lora_rank > 0 and frozen_element(workload) < workload.element


def whole_bytes(workload: Workload, trainer: Trainer) -> tuple[float, float, float]:
    """Weight, gradient and optimizer states per parameter of a table that is trained as a whole beside adapters.

    It is a copy of the frozen table in the dtype of that (fp32 beside a base of 4 or 8 bits), and gradients and moments have the
    dtype of their parameter.  [peft, utils/other.py: ModulesToSaveWrapper.update, a deep copy, prepare_model_for_kbit_training;
    tuners_utils.py: cast_adapter_dtype, of adapters alone]  unsloth prepares no base in fp32: its copies are in bf16, and beside
    fp16 in fp32.  [unsloth, models/llama.py: _offload_frozen_module_for_training; unsloth_zoo, training_utils.py]  LLaMA-Factory
    casts all that is trained to fp32, axolotl brings tables back to the dtype of the job before it copies them, DeepSpeed has them
    as any other weight.  [LLaMA-Factory, model/adapter.py; axolotl, loaders/model.py: _configure_embedding_dtypes]
    """
    own = "frozen" if trainer.kernels.half_adapters else trainer.legal.fine_tuning.tables
    if trainer.code_base == "deepspeed":
        return trainer.stored.weight_bytes, trainer.stored.gradient_bytes, trainer.states_of(workload.optimizer)
    if trainer.legal.offload_frozen_tables:
        each = 4.0 if workload.precision == "fp16" else frozen_other(workload)
    elif own:
        each = 4.0 if own == "fp32" else frozen_other(workload)
    else:
        each = 4.0 if dequantised(workload) else frozen_other(workload)
    return each, each, PURE_STATES[workload.optimizer] * each / 2.0


def quantised_weights(workload: Workload, trainer: Trainer) -> bool:
    """Trained linear weights of layers lie in fp8, the master weights beside them as ever."""
    return "parameters" in trainer.kernels.fp8 and workload.precision in FP8_WEIGHTS and not workload.lora_rank


def frozen_element(workload: Workload) -> float:
    """Bytes per parameter of frozen linear layers."""
    return FROZEN_BYTES.get(workload.frozen_weights, workload.element)


def dequantised(workload: Workload) -> bool:
    """Frozen weights are brought to bf16 before each product; fp8 weights are not where products run in fp8, nor nvfp4 in fp4."""
    if frozen_element(workload) == workload.element:
        return False
    return workload.precision not in RUNS_AS_IT_LIES.get(workload.frozen_weights, ())
