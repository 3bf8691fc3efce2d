"""What Megatron-LM, its forks, NeMo and Primus do by themselves: what engines drop, what checkpoints and variables decide."""

from pathlib import Path

import pytest
from import_files import written

from planner.layout import Recompute
from planner.trainer import load_trainer
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given, OpenQuestionsError

MEGATRON = """{before}
torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --num-layers 8 \\
    --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 \\
    --global-batch-size 64 --vocab-size 32000 --bf16 {more}
"""
PRIMUS = """work_group: a
exp_name: b
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: llama3.1_8B.yaml
    overrides: {{micro_batch_size: 2, global_batch_size: 64, seq_length: 4096, {more}}}
"""
NEMO_1 = """name: megatron_gpt
trainer: {{devices: 8, num_nodes: 2, precision: bf16}}
model:
  micro_batch_size: 4
  global_batch_size: 64
  tensor_model_parallel_size: 2
  encoder_seq_length: 2048
  max_position_embeddings: 2048
  num_layers: 24
  hidden_size: 2048
  ffn_hidden_size: 8192
  num_attention_heads: 16
  use_cpu_initialization: False
  megatron_amp_O2: True
  tokenizer: {{library: megatron, type: GPT2BPETokenizer}}
  optim: {{name: distributed_fused_adam}}
  {more}
"""
NEMO_2 = """from nemo import lightning as nl
from nemo.collections import llm
trainer = nl.Trainer(devices=8, strategy=nl.MegatronStrategy(tensor_model_parallel_size=2){more})
llm.finetune(model=llm.LlamaModel(llm.Llama31Config8B()), data=llm.SquadDataModule(seq_length=2048), trainer=trainer)
"""


def _megatron(folder: Path, more: str, before: str = "", tp: int = 2, pp: int = 1, **settings: str) -> Reading:
    text = MEGATRON.format(more=more, before=before, tp=tp, pp=pp)
    return read(written(folder, text, "train.sh"), None, Given(settings=settings))


def _says(found: Reading, words: str) -> bool:
    return any(words in one for one in found.notes)


@pytest.mark.parametrize("before", ["export NVTE_FLASH_ATTN=0\nexport NVTE_FUSED_ATTN=0", "export NVTE_FLASH_ATTN=0"])
def test_variables_of_transformer_engine_leave_attention_with_scores(tmp_path: Path, before: str) -> None:
    found = _megatron(tmp_path, "--use-mcore-models", before)
    kernel = "unfused" if "FUSED" in before else "flash"
    assert load_trainer(found.trainer).kernels.attention == kernel and _says(found, "NVTE") == (kernel == "unfused")


@pytest.mark.parametrize(("more", "note"), [("", True), ("--use-flash-attn", False), ("--ckpt-format torch_dist", False)])
def test_layers_by_default_are_others_before_april_2024(tmp_path: Path, more: str, note: bool) -> None:
    assert _says(_megatron(tmp_path, more), "default since April 2024") == note


@pytest.mark.parametrize(("more", "kernel"), [("--use-legacy-models", "flash"), ("--ckpt-format torch", "unfused")])
def test_flash_attention_beside_local_layers_is_of_legacy_models(tmp_path: Path, more: str, kernel: str) -> None:
    found = _megatron(tmp_path, f"--use-flash-attn --transformer-impl local {more}")
    assert load_trainer(found.trainer).kernels.attention == kernel


@pytest.mark.parametrize(("more", "note"), [("", True), ("--moe-token-dispatcher-type alltoall", False)])
def test_experts_by_allgather_are_the_default(tmp_path: Path, more: str, note: bool) -> None:
    found = _megatron(tmp_path, f"--num-experts 8 --expert-model-parallel-size 4 --sequence-parallel {more}")
    assert _says(found, "it gathers tokens of all 4 ranks") == note


def test_local_layers_by_spec(tmp_path: Path) -> None:
    assert load_trainer(_megatron(tmp_path, "--spec local --attention-backend local").trainer).kernels.attention == "unfused"


def test_degrees_of_a_checkpoint_are_asked_for(tmp_path: Path) -> None:
    more = "--load /ckpt --use-checkpoint-args --use-mp-args-from-checkpoint-args"
    with pytest.raises(OpenQuestionsError) as error:
        _megatron(tmp_path, more)
    names = [one.name for one in error.value.questions]
    assert names == ["tensor_model_parallel_size", "pipeline_model_parallel_size"]
    found = _megatron(tmp_path, more, **dict(zip(names, ("4", "2"), strict=True)))
    assert (found.fields["tp"], found.fields["pp"]) == (4, 2)


@pytest.mark.parametrize(
    ("more", "note"),
    [
        ("", True), ("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", True), ("--optimizer-cpu-offload", False),
        ("--fp8-format hybrid --fp8-recipe tensorwise", False),
    ],
)  # fmt: skip
def test_master_weights_beside_the_weights(tmp_path: Path, more: str, note: bool) -> None:
    found = _megatron(tmp_path, f"--use-distributed-optimizer --use-precision-aware-optimizer {more}")
    assert _says(found, "too high by 2 bytes for each parameter") == note


@pytest.mark.parametrize(("more", "zero"), [("", 3), ("--torch-fsdp2-no-reshard-after-forward", 2)])
def test_torch_fsdp2_shards_all(tmp_path: Path, more: str, zero: int) -> None:
    found = _megatron(tmp_path, f"--use-torch-fsdp2 --untie-embeddings-and-output-weights {more}")
    assert found.fields["zero"] == zero and found.trainer.startswith("megatron-fsdp") and "gradient_dtype=bf16" in found.trainer
    assert _says(found, "priced as Megatron-FSDP")


def test_weights_of_megatron_fsdp_in_8_bits(tmp_path: Path) -> None:
    words = "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather --data-parallel-sharding-strategy optim_grads_params"
    found = _megatron(tmp_path, f"--use-megatron-fsdp --use-distributed-optimizer {words}")
    assert (found.fields["zero"], found.precision) == (3, "fp8") and _says(found, "too high by 1 byte for each")


@pytest.mark.parametrize("word", ["--distribute-saved-activations", "--partition-activations"])
def test_shared_inputs_of_layers_are_priced_whole(tmp_path: Path, word: str) -> None:
    found = _megatron(tmp_path, f"--recompute-granularity full --recompute-method uniform {word}")
    assert found.fields["recompute"] == Recompute.FULL and _says(found, "priced whole on every rank")


@pytest.mark.parametrize(
    ("more", "recompute", "vpp"),
    [
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", Recompute.NONE, 1),
        ("--recompute-granularity full --recompute-method uniform --num-layers-per-virtual-pipeline-stage 1", Recompute.FULL, 1),
        ("--checkpoint-activations --recompute-granularity selective", Recompute.FULL, 1),
    ],
)  # fmt: skip
def test_what_the_pipeline_engine_of_deepspeed_takes(tmp_path: Path, more: str, recompute: Recompute, vpp: int) -> None:
    found = _megatron(tmp_path, f"--deepspeed --zero-stage 1 {more}", pp=4)
    assert (found.fields["recompute"], found.fields["vpp"]) == (recompute, vpp)
    assert _says(found, "not taken by DeepSpeed's pipeline engine") == ("checkpoint" not in more)
    assert _says(found, "so no layer is recomputed; --recompute-method uniform or") == ("block" in more)


@pytest.mark.parametrize("program", [True, False])
def test_blocks_are_recomputed_without_its_pipeline_engine(tmp_path: Path, program: bool) -> None:
    words = "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
    if program:
        (tmp_path / "pretrain_gpt.py").write_text("model = GPTModel(config)\n")
    found = _megatron(tmp_path, f"--deepspeed {'' if program else '--no-pipeline-parallel'} --zero-stage 1 {words}")
    assert (found.fields["recompute"], found.fields["recompute_layers"]) == (Recompute.FULL, 2)


def test_words_of_megatron_that_change_no_plan_are_not_asked_about(tmp_path: Path) -> None:
    words = "--use-torch-optimizer-for-cpu-offload --use-precision-aware-optimizer --suggested-communication-unit-size 400000000"
    found = _megatron(tmp_path, f"--optimizer-cpu-offload --use-distributed-optimizer {words} --decrease-batch-size-if-needed")
    assert found.fields["offload_optimizer"] == 100 and not found.unread


def test_sequence_parallelism_of_deepspeed_by_force(tmp_path: Path) -> None:
    words = "--zero-stage 1 --ds-sequence-parallel-size 4 --force-ds-sequence-parallel --no-pipeline-parallel"
    assert _megatron(tmp_path, f"--deepspeed {words}", tp=1).fields["cp"] == 4


@pytest.mark.parametrize(("more", "experts"), [("", 0), ("--use-torch-compile 0", 8), ("--moe-top2-2nd-expert-sampling", 8)])
def test_experts_of_a_pipeline_since_2024(tmp_path: Path, more: str, experts: int) -> None:
    found = _megatron(tmp_path, f"--deepspeed --zero-stage 1 --num-experts 8 --moe-expert-parallel-size 4 --topk 2 {more}")
    assert found.model is not None and found.model.num_experts == experts


def _primus(folder: Path, more: str) -> Reading:
    return read(written(folder, PRIMUS.format(more=more)), None, Given(num_gpus=8))


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ("patch_primus_pipeline: true, pp_algorithm: zbv-formatted", "pp_algorithm"),
        ("patch_zero_bubble: true", "patch_zero_bubble"),
        ("patch_primus_pipeline: true, pp_algorithm: 1f1b-interleaved", ""), ("pp_algorithm: zero-bubble", ""),
    ],
)  # fmt: skip
def test_schedules_of_primus_are_asked_about(tmp_path: Path, more: str, name: str) -> None:
    more = f"pipeline_model_parallel_size: 4, num_virtual_stages_per_pipeline_rank: 2, {more}"
    if not name:
        assert _primus(tmp_path, more).fields["vpp"] == 2
        return
    with pytest.raises(OpenQuestionsError) as error:
        _primus(tmp_path, more)
    assert [one.name for one in error.value.questions] == [name]


def test_lists_of_layers_of_primus(tmp_path: Path) -> None:
    split = _primus(tmp_path, "pipeline_model_parallel_size: 4, decoder_pipeline_manual_split_list: [7, 8, 8, 9]")
    assert (split.fields["first_stage_layers"], split.fields["last_stage_layers"]) == (7, 9)
    again = _primus(tmp_path, "recompute_granularity: full, recompute_layer_ids: '0,1,2'")
    assert (again.fields["recompute"], again.fields["recompute_layers"]) == (Recompute.FULL, 3)


def test_torch_fsdp2_of_primus(tmp_path: Path) -> None:
    assert _primus(tmp_path, "use_torch_fsdp2: true, use_distributed_optimizer: false").fields["zero"] == 3


@pytest.mark.parametrize(
    ("more", "kernel"),
    [("transformer_engine: False", "unfused"), ("mcore_gpt: True", "flash"), ("use_flash_attention: True", "flash")],
)
def test_layers_of_nemo_1_keep_scores(tmp_path: Path, more: str, kernel: str) -> None:
    found = read(written(tmp_path, NEMO_1.format(more=more), "megatron_gpt.yaml"))
    assert load_trainer(found.trainer).kernels.attention == kernel and _says(found, "attention unfused") == (kernel == "unfused")


@pytest.mark.parametrize(
    ("recipe", "words", "length", "batch"),
    [
        ("llama31_8b", "packed_sequence=True", 4096, 8), ("llama32_1b", "packed_sequence=True", 4096, 8),
        ("qwen2_7b", "packed_sequence=True", 2048, 8), ("llama31_8b", "performance_mode=True, packed_sequence=False", 2048, 128),
        ("llama31_8b", "packed_sequence=True, seq_length=8192", 8192, 8),
    ],
)  # fmt: skip
def test_recipes_of_nemo_2_that_pack_samples(tmp_path: Path, recipe: str, words: str, length: int, batch: int) -> None:
    text = f"from nemo.collections import llm\nrecipe = llm.{recipe}.finetune_recipe(peft_scheme=None, {words})\n"
    found = read(written(tmp_path, text, "tune.py"), None, Given(settings={"recipe_version": "main"}))
    assert (found.sequence_length, found.global_batch_size) == (length, batch)


@pytest.mark.parametrize(("more", "note"), [("", True), (', plugins=nl.MegatronMixedPrecision(precision="bf16-mixed")', False)])
def test_a_trainer_of_nemo_2_without_plugins_is_fp32(tmp_path: Path, more: str, note: bool) -> None:
    assert _says(read(written(tmp_path, NEMO_2.format(more=more), "tune.py")), "all is in fp32") == note


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("packed_sequence=True", ["recipe", "--sequence-length S", "--global-batch-size B", "--gpus N"]),
        ("seq_length=4096, global_batch_size=8", ["recipe", "--gpus N"]),
    ],
)
def test_older_recipes_of_megatron_bridge_for_both_kinds_of_fine_tuning(tmp_path: Path, words: str, names: list[str]) -> None:
    text = "from megatron.bridge.recipes.qwen import qwen25_7b_finetune_config as made\nfrom megatron.bridge import finetune\n"
    path = written(tmp_path, f"{text}cfg = made(peft='lora', {words})\nfinetune(config=cfg)\n", "tune.py")
    with pytest.raises(OpenQuestionsError) as error:
        read(path)
    assert [one.name for one in error.value.questions] == names
    given = Given(num_gpus=8, sequence_length=4096, global_batch_size=8, settings={"recipe": "qwen25_7b_peft_config"})
    assert (read(path, None, given).lora_rank > 0) and not read(path, None, given).questions


@pytest.mark.parametrize(("kernel", "scores"), [("unfused", True), ("flash", False)])
def test_attention_by_a_member_of_megatrons_list(tmp_path: Path, kernel: str, scores: bool) -> None:
    text = "from nemo.collections import llm\nrecipe = llm.llama31_8b.pretrain_recipe(num_nodes=1)\n"
    path = written(tmp_path, f"{text}recipe.model.config.attention_backend = AttnBackend.{kernel}\n", "train.py")
    found = read(path, None, Given(settings={"recipe_version": "main"}))
    assert not found.questions and (load_trainer(found.trainer).kernels.attention == "unfused") == scores


@pytest.mark.parametrize(
    ("lines", "zero", "trainer"),
    [
        ("cfg.ddp.use_megatron_fsdp = True\ncfg.ddp.data_parallel_sharding_strategy = 'optim_grads'", 2, "megatron-fsdp"),
        ("cfg.dist.use_megatron_fsdp = True\ncfg.ddp.data_parallel_sharding_strategy = 'optim'", 1, "megatron-bridge"),
        ("cfg.dist.use_megatron_fsdp = False", 1, "megatron-bridge"),
    ],
)
def test_megatron_fsdp_under_megatron_bridge(tmp_path: Path, lines: str, zero: int, trainer: str) -> None:
    text = "from megatron.bridge.recipes.llama import llama3_8b_pretrain_config\nfrom megatron.bridge import pretrain\n"
    path = written(tmp_path, f"{text}cfg = llama3_8b_pretrain_config()\n{lines}\npretrain(config=cfg)\n", "train.py")
    found = read(path, None, Given(num_gpus=8, settings={"recipe_version": "main"}))
    assert found.fields["zero"] == zero and found.trainer.startswith(trainer) and not found.questions
    path.write_text(path.read_text().replace("cfg.ddp.data_parallel_sharding_strategy", "strategy"))
    again = read(path, None, Given(num_gpus=8, settings={"recipe_version": "main"}))
    assert [one.name for one in again.questions] == ["ddp.data_parallel_sharding_strategy"] * ("fsdp = True" in lines)
