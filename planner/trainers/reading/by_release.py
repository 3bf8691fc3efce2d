"""What transformers, accelerate and torch do by themselves with weights and gradients, by release, whatever a file says."""

import re
from collections.abc import Iterator

from planner.cost.parameters import count_parameters, total_parameters
from planner.model import ModelSpec
from planner.trainer import load_trainer
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Question
from planner.trainers.reading.kernels import class_of
from planner.trainers.reading.loading import BY_PEFT, UNDATED
from planner.trainers.reading.programs import program_file
from planner.trainers.reading.settings import Settings, beside, file_settings
from planner.trainers.reading.sharding import Sharding, casts_all
from planner.trainers.reading.values import read_text
from planner.trainers.reading.versions import newer
from planner.units import GIB

FIVE, UPCASTS, LEAVES_FROZEN = (5,), (0, 30), (1, 13)
"""Versions: of transformers, whose from_pretrained takes the dtype of the checkpoint by itself; of accelerate, whose FSDP brings
trained weights to fp32 under mixed precision; that leaves frozen ones as they are in FSDP2 too.  [transformers, modeling_utils.py;
accelerate, accelerator.py: prepare_model; utils/fsdp_utils.py: fsdp2_prepare_model]"""
NEEDS = {"accelerate": (1, 1), "torch": (2, 2)}
"""What transformers 5 is not installed without."""
OLD = re.compile(
    r"\b(evaluation_strategy|overwrite_output_dir|no_cuda|per_gpu_train_batch_size|save_safetensors|fp16_(backend|opt_level)|use_ipex"
    r"|half_precision_backend|use_mps_device|push_to_hub_(token|model_id)|include_tokens_per_second|tpu_num_cores|use_auth_token"
    r"|fsdp_(min_num_params|transformer_layer_cls_to_wrap)|prepare_model_for_int8_training)\b|Trainer\([^()]*\btokenizer\s*="
)
"""Words that transformers 5 refuses.  [transformers 4.57 and 5.0, training_args.py]"""
FULL = re.compile(
    r"(^|[/-])(distil)?gpt-?2(-(medium|large|xl))?$|gpt-neo-|gpt-j-|cerebras-gpt|dialogpt|tinyllama\S*(step|intermediate)"
)
"""Names of models whose checkpoints lie in fp32.  [their config.json and safetensors]"""
EXAMPLES = re.compile(r"(^|/)run_(clm|fim)(_no_trainer)?\.py$")
"""Programs of transformers whose load names none where their command does not.  [examples/pytorch/language-modeling]"""

DEAF = (4, 46), (5, 3)
"""Versions of transformers from and before which its Trainer runs no_sync whatever sync_each_batch says (5.1, 5.2: not read)."""
EMBEDDING_STATES = (4, 52)
"""Version of transformers that keeps them so; before, it looks for a class by another name.  [trainer.py: create_optimizer]"""


WHOLE = (
    "its loop wraps the model as one unit: every GPU gathers all weights at once and keeps their gradients whole, priced layer by "
    "layer: time and memory come out too low"
)
CASTS_EACH = (
    "autocast over weights in fp32, which FSDP gathers and reduces as they are, priced in 16 bits: communication and a gathered "
    "layer come out too small by half"
)


def dtype_of_load(given: Settings, script: str, sharding: Sharding, precision: str, adapters: bool) -> tuple[Question, ...]:
    """Puts the dtype of weights whose load says none, by the version of transformers; asks where that decides and is not known."""
    undated = given.flag(UNDATED) or EXAMPLES.search(script) is not None
    if not undated or given.first("dtype", "torch_dtype") is not None:
        return ()
    new = newer(given.path, "transformers", FIVE)
    files = (given.path, program_file(given.path, script) if script else None)
    old = OLD.search(" ".join((*given.data, *(read_text(one) for one in files if one is not None))))
    if new is None and (old or any(newer(given.path, *one) is False for one in NEEDS.items())):
        new = False
    if new is not None:
        given.usual = {**given.usual, "torch_dtype": "auto" if new else "float32"}
    brought = sharding.kind == "deepspeed" or (sharding.kind == "fsdp" and precision != "fp32")  # to fp32, but for frozen ones
    brought = brought and not (sharding.kind == "fsdp" and "wrapped" in given.usual)  # torch's own leaves them as they are
    if new is not None or casts_all(sharding, precision) or (brought and not adapters):
        return ()
    about = "what its weights are loaded in: transformers 5 takes the dtype of the checkpoint, 4 takes float32"
    return (Question(name="torch_dtype", about=about, choices=("bfloat16", "float32")),)


def fill_in(given: Settings, name: str) -> None:
    """Puts settings of accelerate that lie in a file, the layers that PEFT adapts in a model of that name, and the dtype that its
    class makes layers in by itself, where its load says none.  [Qwen-7B, modeling_qwen.py; chatglm3-6b, modeling_chatglm.py]"""
    if isinstance(file := given.data.get("accelerator_config"), str) and (there := beside(given.path, file)) is not None:
        given.data = {**given.data, "accelerator_config": file_settings(there, "settings of accelerate")}
    found = class_of(name).get("peft", "q_proj v_proj").split()
    if given.flag(UNDATED) and "itself" in class_of(name):
        given.usual = {"torch_dtype": class_of(name)["itself"], **given.usual}
    for part in ("data", "usual"):
        said = getattr(given, part)
        if said.get("lora_target_modules") == BY_PEFT:
            setattr(given, part, {**said, "lora_target_modules": found})


def in_half(dtype: str, name: str) -> bool:
    """Whether weights of a model are loaded in 16 bits; auto is the dtype of its checkpoint."""
    return dtype in ("bfloat16", "bf16", "float16", "fp16") or (dtype == "auto" and FULL.search(name.lower()) is None)


def upcasts(given: Settings, mixed: bool) -> bool:
    """Whether FSDP trains weights in fp32 that were loaded in 16 bits; ``mixed`` precision is said."""
    return mixed and "wrapped" not in given.usual and newer(given.path, "accelerate", UPCASTS) is not False


def of_wrapper(given: Settings, trainer: str, sharding: Sharding, job: Reading, spec: ModelSpec | None) -> Iterator[str]:
    """Notes about what torch's wrappers, accelerate and bitsandbytes hold beside what is priced, and evaluation."""
    yield from _of_evaluation(given, trainer, job, spec)
    kind, ranks = sharding.kind, job.fields.get("dp_shard") or job.fields.get("dp", 0)
    all_weights = total_parameters(spec) if spec is not None else 0.0
    each, shards = 2.0 if job.precision == "bf16_true" else 4.0, ranks if job.fields.get("zero") and ranks else 1
    yield from given.usual.get("loop_notes", ())
    wide = given.usual.get("casts_each") is True and kind == "fsdp" and job.precision != "bf16_true"
    if given.usual.get("one_unit"):
        yield f"{WHOLE}{_by(2 * (4.0 if wide or job.precision == 'fp32' else 2.0) * all_weights * (1 - 1 / shards))}"
    if wide:
        yield CASTS_EACH
    buffers = sharding.buffers * (4.0 if job.precision == "fp32" else 2.0)
    if kind == "deepspeed" and buffers > (1.0 * GIB + 2.0 * all_weights / shards) / 20:
        what = "buffers that DeepSpeed reduces gradients through (reduce_bucket_size) are not priced"
        yield f"{what}: memory comes out too low by {buffers / GIB:.1f} GiB"
    moved = kind == "deepspeed" and job.fields.get("offload_optimizer") == 100 and job.fields.get("zero", 0) >= 2
    if moved and not job.lora_rank:
        what = "reduced gradients go to the host with the states, and are priced on the GPU"
        yield f"{what}: memory comes out too high{_by(2.0 * all_weights / shards)}"
    if job.lora_rank:
        of_two = sharding.version == 2 and newer(given.path, "accelerate", LEAVES_FROZEN) is not True
        if kind == "fsdp" and of_two and job.frozen_weights == "bf16" and job.precision in ("bf16", "fp16"):
            who = "accelerate before 1.13 casts frozen weights to fp32 too under FSDP2"
            yield f"{who}, priced in bf16: memory then comes out too low{_by(2.0 * all_weights / shards)}"
        return
    if job.optimizer == "sgd" and "momentum" not in str(given.get("optim_args")):
        what = "SGD is priced with momentum: without, as transformers makes it"
        yield f"{what}, memory comes out too high{_by(each * all_weights / shards)}"
    eight = job.optimizer.endswith("adam_8bit") and re.search("torch|ao_", str(given.get("optim"))) is None
    since = newer(given.path, "transformers", EMBEDDING_STATES)
    if eight and since is not False and kind == "ddp" and spec is not None and not given.usual.get("own_loop"):
        table = 6.0 * count_parameters(spec).input_embedding / shards
        if table > (1.0 * GIB + 2.0 * all_weights) / 50:
            only = "" if since else "; not so before transformers 4.52"
            yield f"states of the embedding stay in 32 bits, priced in 8: memory comes out too low{_by(table)}{only}"


def _by(size: float) -> str:
    return f" by up to {size / GIB:.1f} GiB" if size else ""


def _of_evaluation(given: Settings, trainer: str, job: Reading, spec: ModelSpec | None) -> Iterator[str]:
    """Note about scores of an evaluation while training that are larger than what a training step has and it has not: all in half
    precision, in fp32 and their log softmax, as Liger fuses while a model trains alone. TRL has it fuse there too since 0.29, and
    takes its loss in pieces there as well.  [transformers, loss_utils.py: ForCausalLMLoss; trl/trainer/sft_trainer.py: skip_logits;
    Liger-Kernel, transformers/model/llama.py: self.training; axolotl, utils/config: eval_batch_size]"""
    word = {**given.usual, **given.data}.get  # what is open is not asked for
    named = f"{word('eval_strategy')} {word('evaluation_strategy')}".lower()
    apart = word("val_set_size") not in (None, 0, "0") or word("test_datasets")
    on = apart if trainer == "axolotl" else re.search(r"(^| |\.)(steps|epoch)\b", named)
    loss, micro = load_trainer(job.trainer).stored.loss, job.fields.get("micro_batch_size", 1)
    length = (given.said.sequence_length if given.said is not None else None) or job.sequence_length
    fused, pieces = loss == "fused_linear", loss == "chunked" or "CutCrossEntropy" in str(word("plugins"))
    skips = fused and trainer == "trl" and newer(given.path, "trl", EVAL_FUSED)
    if not on or pieces or skips or trainer == "unsloth" or job.objective != "lm" or spec is None or not length:
        return
    usual = {"axolotl": micro, "ms-swift": 1}.get(trainer, 8)
    said = str(word("eval_batch_size" if trainer == "axolotl" else "per_device_eval_batch_size"))
    rows = int(said) if re.fullmatch(r"[1-9]\d{0,5}", said) else usual
    tokens, weights = length / job.fields.get("cp", 1), total_parameters(spec)
    shards = (job.fields.get("dp_shard") or job.fields.get("dp", 1)) if job.fields.get("zero", 0) >= 2 else 1
    gradients = 0.0 if job.lora_rank else (2.0 if job.precision == "bf16_true" else 4.0) * weights / shards
    layers = (2.0 if job.fields.get("recompute") else 34.0) * spec.num_layers * spec.hidden_size
    scores = (8.0 if job.precision == "fp32" else 10.0) * rows * tokens * spec.vocab_size
    more = scores - micro * tokens * (layers + 14.0 * spec.vocab_size * (not fused)) - gradients
    if more > (1.0 * GIB + 2.0 * weights / shards) / 20:
        release = ", before TRL 0.29 with Liger too" * (fused and trainer == "trl")
        what = f"evaluation while training takes all scores of {rows} x {length} tokens at once{release}"
        above = f"up to {scores / GIB:.1f} GiB, {more / GIB:.1f} GiB above the peak of a training step"
        yield f"{what}: {above}, which is what a plan prices"


EVAL_FUSED = (0, 29)
"""Version of TRL since which Liger's loss is fused in evaluation."""


def syncs_each(given: Settings) -> bool:
    """Whether every pass reduces gradients: accelerate is told so, and the Trainer hears it, or a loop has no accelerate."""
    said = f"{given.data.get('accelerator_config')} sync_each_batch {given.usual.get('sync_each_batch')}"
    told = re.search(r"sync_each_batch\W+True", said) is not None
    deaf = newer(given.path, "transformers", DEAF[0]) is True and newer(given.path, "transformers", DEAF[1]) is False
    return bool(given.usual.get("shards_itself")) or (told and (not deaf or bool(given.usual.get("own_loop"))))
