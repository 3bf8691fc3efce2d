"""What NVIDIA's and verl's fine-tuning does that its files do not say: losses, what is recomputed, whose defaults count."""

from pathlib import Path

import pytest
from import_files import NEMO_RL, asked_for, written

import planner
from planner.errors import PlannerError
from planner.layout import Recompute
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

AUTOMODEL = """recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 1}
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: meta-llama/Llama-3.1-8B}
packed_sequence: {packed_sequence_size: 4096}
"""


def _automodel(folder: Path, more: str, **settings: str) -> Reading:
    return read(written(folder, AUTOMODEL + more), None, Given(num_gpus=8, settings=settings))


@pytest.mark.parametrize(
    ("more", "compiled"),
    [
        ("distributed: {strategy: fsdp2}", "off"), ("compile: {enabled: true}", "on"),
        ("distributed: {strategy: fsdp2, enable_compile: true}", "on"), ("compile: {mode: default}", "off"),
    ],
)  # fmt: skip
def test_automodel_compiles_where_it_is_told_to(tmp_path: Path, more: str, compiled: str) -> None:
    assert _automodel(tmp_path, more).trainer == f"automodel+compile={compiled}+gradient_sync=last"


@pytest.mark.parametrize(
    ("loss", "option"),
    [
        ("masked_ce.MaskedCrossEntropy", ""), ("masked_ce.MaskedCrossEntropy, fp32_upcast: true", ""),
        ("masked_ce.MaskedCrossEntropy, fp32_upcast: false", "+loss=bf16"), ("chunked_ce.ChunkedCrossEntropy", "+loss=bf16"),
        ("linear_ce.FusedLinearCrossEntropy", "+loss=fused_linear"), ("te_parallel_ce.TEParallelCrossEntropy", "+loss=in_place"),
    ],
)  # fmt: skip
def test_automodels_losses_hold_different_logits(tmp_path: Path, loss: str, option: str) -> None:
    found = _automodel(tmp_path, f"loss_fn: {{_target_: nemo_automodel.components.loss.{loss}}}")
    assert found.trainer == f"automodel+compile=off{option}+gradient_sync=last" and not found.notes
    compiled = _automodel(tmp_path, f"compile: {{enabled: true}}\nloss_fn: {{_target_: nemo_automodel.components.loss.{loss}}}")
    assert compiled.trainer == f"automodel+compile=on{option.removesuffix('+loss=bf16')}+gradient_sync=last"


def test_logits_without_an_fp32_copy_are_6_bytes_and_fused_ones_none() -> None:
    """8192 tokens of 128,256 words: 14 bytes of each logit, 6 without fp32, none where they are never written."""
    job = {"model": "llama-8b", "gpus": 8, "hardware": "h100-sxm", "sequence_length": 8192, "global_batch_size": 8,
           "micro_batch_size": 1, "recompute": "full", "zero": 3, "precision": "bf16_true"}  # fmt: skip
    peaks = [
        planner.estimate(**job, trainer=f"automodel+compile=off{loss}").estimate.memory
        for loss in ("", "+loss=bf16", "+loss=fused_linear")
    ]
    assert (peaks[0] - peaks[1]) / (8192 * 128256) == pytest.approx(8.0 * 1.05)  # fragmentation
    assert peaks[2] < peaks[1] - 2.0 * 8192 * 128256


def test_automodel_recomputes_the_parts_of_a_dense_layer(tmp_path: Path) -> None:
    on = _automodel(tmp_path, "distributed: {strategy: fsdp2, activation_checkpointing: true}")
    assert on.fields["recompute"] == Recompute.FULL and "four inputs of a layer are kept" in " ".join(on.notes)
    assert "four inputs" not in " ".join(_automodel(tmp_path, "distributed: {strategy: fsdp2}").notes)
    experts = _automodel(tmp_path, "distributed: {strategy: fsdp2, ep_size: 8, activation_checkpointing: true}")
    assert "four inputs" not in " ".join(experts.notes)  # its mixtures wrap whole layers


def test_gathered_weights_of_mixtures_have_a_word_of_their_own(tmp_path: Path) -> None:
    text = "distributed: {strategy: fsdp2, ep_size: 8, reshard_after_forward: true}"
    assert asked_for(_automodel(tmp_path, text)) == ["distributed.moe.reshard_after_forward"]
    answer = {"distributed.moe.reshard_after_forward": "true"}
    assert _automodel(tmp_path, text, **answer).fields["zero"] == 3
    answer["distributed.moe.reshard_after_forward"] = "false"
    assert _automodel(tmp_path, text, **answer).fields["zero"] == 2
    said = _automodel(tmp_path, "distributed: {strategy: fsdp2, ep_size: 8, moe: {reshard_after_forward: true}}")
    assert said.fields["zero"] == 3 and not asked_for(said)


def test_managers_of_automodels_first_releases(tmp_path: Path) -> None:
    text = "distributed: {{_target_: nemo_automodel.components.distributed.{}, tp_size: 1}}"
    assert _automodel(tmp_path, text.format("fsdp2.FSDP2Manager")).fields["zero"] == 3
    assert _automodel(tmp_path, text.format("ddp.DDPManager")).fields["zero"] == 0
    for other in ("megatron_fsdp.MegatronFSDPManager", "nvfsdp.NVFSDPManager"):
        with pytest.raises(PlannerError, match="is not modelled in AutoModel"):
            _automodel(tmp_path, text.format(other))


def test_automodel_computes_in_what_its_layers_are_gathered_in(tmp_path: Path) -> None:
    policy = "distributed: {strategy: fsdp2, mp_policy: {_target_: torch.Policy, param_dtype: DTYPE, output_dtype: null}}"
    full = AUTOMODEL.replace("pretrained_model_name", "torch_dtype: float32, pretrained_model_name")
    for dtype, precision in (("torch.float32", "fp32"), ("bfloat16", "bf16")):
        found = read(written(tmp_path, full + policy.replace("DTYPE", dtype)), None, Given(num_gpus=8))
        assert found.precision == precision and not found.unread
    with pytest.raises(PlannerError, match=r"mp_policy\.param_dtype"):
        _automodel(tmp_path, policy.replace("DTYPE", "float32"))


@pytest.mark.parametrize(
    ("dtype", "own", "kept"),
    [
        ("bf16", "", ("bf16_true", "bf16")), ("float32", "", ("bf16", "fp32")),
        ("bf16", ", lora_dtype: torch.float32", ("bf16", "bf16")),
    ],
)  # fmt: skip
def test_adapters_of_automodel_are_in_the_dtype_of_their_layers(
    tmp_path: Path, dtype: str, own: str, kept: tuple[str, str]
) -> None:
    text = AUTOMODEL.replace("pretrained_model_name", f"torch_dtype: {dtype}, pretrained_model_name")
    text += f"peft: {{_target_: nemo_automodel.components._peft.lora.PeftConfig, match_all_linear: true, dim: 8{own}}}\n"
    found = read(written(tmp_path, text), None, Given(num_gpus=8))
    assert (found.precision, found.frozen_weights) == kept
    every = read(written(tmp_path, text.replace("match_all_linear: true", "target_modules: '*_proj'")), None, Given(num_gpus=8))
    assert every.lora_targets == "all" and "adapters on" not in " ".join(every.notes)


def test_what_nemo_rl_recomputes_over_dtensor_is_said(tmp_path: Path) -> None:
    text = NEMO_RL + "  dtensor_cfg: {enabled: true, activation_checkpointing: %s%s}\ncluster: {gpus_per_node: 8}\n"
    old, new, off = (
        " ".join(read(written(tmp_path, text % one)).notes) for one in (("true", ""), ("true", ", _v2: true"), ("false", ""))
    )
    assert "up to NeMo-RL 0.3 the MLP of a layer alone" in old and "four inputs" in old
    assert "0.3" not in new and "four inputs" in new and "activation_checkpointing" not in off


@pytest.mark.parametrize(
    ("dtype", "option"), [("null", "router_dtype=bf16"), ("fp32", "router_dtype=fp32"), ("fp64", "router_dtype=fp32")]
)
def test_what_routers_of_nemo_rl_compute_in(tmp_path: Path, dtype: str, option: str) -> None:
    text = NEMO_RL.replace("Qwen3-8B", "Qwen3-30B-A3B") + f"  megatron_cfg: {{enabled: true, moe_router_dtype: {dtype}}}\n"
    found = read(written(tmp_path, text + "cluster: {gpus_per_node: 8}\n"))
    assert [one for one in found.trainer.split("+") if one.startswith("router")] == [option]
    text = text.replace("Qwen/Qwen3-30B-A3B", "/models/ours") + "cluster: {gpus_per_node: 8}\n"
    assert option in read(written(tmp_path, text), None, Given(model="qwen3-30b-a3b")).trainer.split("+")


RUN = "torchrun --nproc_per_node=2 -m verl.trainer.fsdp_sft_trainer data.train_batch_size=64 {}\n"
QWEN = "model.partial_pretrain=Qwen/Qwen3-0.6B"
CONFIG = """data: {{train_batch_size: 256, micro_batch_size_per_gpu: 4, max_length: {length}}}
model:
  {{partial_pretrain: none, enable_gradient_checkpointing: false, lora_rank: 0, target_modules: all-linear,
    fsdp_config: {{model_dtype: {dtype}}}}}
optim: {{lr: 1e-5}}
trainer: {{total_epochs: 1}}
"""


def _kept(found: Reading) -> list[object]:
    return [found.sequence_length, found.precision, found.fields["recompute"]]


def test_the_configuration_that_a_projects_sft_trainer_names(tmp_path: Path) -> None:
    program = "@hydra.main(config_path='our/configs', config_name='our_sft', version_base=None)\ndef main(config):\n    run()\n"
    written(tmp_path, program, "verl/trainer/fsdp_sft_trainer.py")
    written(tmp_path, CONFIG.format(length=1024, dtype="fp32"), "verl/trainer/config/sft_trainer.yaml")
    written(tmp_path, CONFIG.format(length=2048, dtype="bf16"), "our/configs/our_sft.yaml")
    found = read(written(tmp_path, RUN.format(QWEN), "run.sh"))
    assert _kept(found) == [2048, "bf16_true", Recompute.NONE] and "our_sft.yaml" in " ".join(found.notes)
    path = RUN.replace("-m verl.trainer.fsdp_sft_trainer", "/home/x/verl/verl/trainer/fsdp_sft_trainer.py")
    assert _kept(read(written(tmp_path, path.format(QWEN), "run.sh")))[0] == 2048
    adapted = read(written(tmp_path, RUN.format(f"{QWEN} model.lora_rank=8"), "run.sh"))
    assert (adapted.precision, adapted.frozen_weights) == ("bf16_true", "bf16")  # the whole model is cast, adapters too
    plain = program.replace("our/configs", "config").replace("our_sft", "sft_trainer")
    written(tmp_path, plain, "verl/trainer/fsdp_sft_trainer.py")
    assert _kept(read(written(tmp_path, RUN.format(QWEN), "run.sh")))[0] == 1024


def test_the_configuration_that_a_command_names(tmp_path: Path) -> None:
    own = CONFIG.format(length=2048, dtype="fp32").replace("fp32", "fp32, cpu_offload: true, offload_params: true")
    written(tmp_path, own.replace("partial_pretrain: none", "partial_pretrain: Qwen/Qwen3-0.6B, strategy: fsdp"), "conf/ours.yaml")
    named = 'ROOT="$(dirname "$0")/.."\n' + RUN.replace("data.train", '--config-path "$ROOT/conf" --config-name NAME data.train')
    found = read(written(tmp_path, named.replace("NAME", "ours").format(""), "scripts/run.sh"))
    assert _kept(found) == [2048, "bf16", Recompute.NONE] and found.model is not None and not found.questions
    assert found.fields["micro_batch_size"] == 4 and found.fields["offload_parameters"] == 1 and found.global_batch_size == 64
    short = named.replace("--config-path", "-cp").replace("--config-name NAME", "-cn ours").format("")
    assert _kept(read(written(tmp_path, short, "scripts/run.sh")))[0] == 2048
    with pytest.raises(PlannerError, match="it names the configuration 'theirs', which is not there"):
        read(written(tmp_path, named.replace("NAME", "theirs").format(QWEN), "scripts/run.sh"))
    usual = read(written(tmp_path, named.replace("NAME", "sft_trainer.yaml").format(QWEN), "scripts/run.sh"))
    assert _kept(usual) == [1024, "bf16", Recompute.FULL] and "verl's own is taken" in " ".join(usual.notes)


def test_a_verl_that_lacks_a_key_of_the_command_is_not_the_one_that_runs(tmp_path: Path) -> None:
    written(tmp_path, CONFIG.format(length=4096, dtype="fp32"), "verl/trainer/config/sft_trainer.yaml")
    same, other = (read(written(tmp_path, RUN.format(f"{QWEN}{one}"), "run.sh")) for one in ("", " model.use_liger=True"))
    assert _kept(same) == [4096, "bf16", Recompute.NONE] and _kept(other) == [1024, "bf16", Recompute.FULL]
    assert "model.use_liger is no key of the verl around" in " ".join(other.notes)
    added = read(written(tmp_path, RUN.format(f"{QWEN} +model.use_liger=True"), "run.sh"))
    assert _kept(added)[0] == 4096


def test_what_verl_recomputed_before_is_said_where_no_release_shows(tmp_path: Path) -> None:
    for more, said in (("", True), (" model.enable_gradient_checkpointing=true", False), (" trainer.resume_mode=disable", False)):
        found = read(written(tmp_path, RUN.format(QWEN + more), "run.sh"))
        assert ("since verl 0.4.1" in " ".join(found.notes)) == said and found.fields["recompute"] == Recompute.FULL


def test_a_module_of_a_project_around_verls_sft_trainer(tmp_path: Path) -> None:
    written(tmp_path, CONFIG.format(length=4096, dtype="fp32"), "verl/verl/trainer/config/sft_trainer.yaml")
    for module in ("recipe.ours.own_sft_trainer", "ours.start_training"):
        text = RUN.replace("verl.trainer.fsdp_sft_trainer", module).format(f"{QWEN} ulysses_sequence_parallel_size=2")
        found = read(written(tmp_path, text, "run.sh"))
        assert _kept(found) == [4096, "bf16", Recompute.NONE] and found.fields["cp"] == 2


def test_a_recipe_of_nemo_that_a_module_beside_the_program_builds(tmp_path: Path) -> None:
    built = (
        "from nemo.collections import llm\n\n\ndef configure(nodes: int = 1, gpus: int = 8):\n"
        "    recipe = llm.llama3_8b.pretrain_recipe(name='a', num_nodes=nodes, num_gpus_per_node=gpus)\n"
        "    recipe.trainer.strategy.tensor_model_parallel_size = 4\n    return recipe\n"
    )
    program = (
        "import nemo_run as run\nfrom recipe_parts import configure\n\n"
        "if __name__ == '__main__':\n    run.run(configure(nodes=2), executor=run.LocalExecutor())\n"
    )
    written(tmp_path, built, "recipe_parts.py")
    found = read(written(tmp_path, program, "start.py"))
    assert found.num_gpus == 16 and found.fields["tp"] == 4


def test_ligers_loss_does_not_run_in_verl_which_gives_the_model_no_labels(tmp_path: Path) -> None:
    for word, lean in (("model.use_liger=True", False), ("model.use_fused_kernels=True", True)):
        found = read(written(tmp_path, RUN.format(f"{QWEN} {word}"), "run.sh"))
        assert ("loss=fused_linear" in found.trainer) == lean and not found.unread


def test_a_granularity_that_megatron_does_not_know_is_refused(tmp_path: Path) -> None:
    text = NEMO_RL + "  megatron_cfg: {enabled: true, activation_checkpointing: true, recompute_granularity: uniform}\n"
    with pytest.raises(PlannerError, match="recompute_granularity is 'uniform'; Megatron Core knows full and selective"):
        read(written(tmp_path, text), None, Given(num_gpus=8))
