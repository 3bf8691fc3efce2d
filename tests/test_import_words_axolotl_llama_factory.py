"""Every setting that axolotl and LLaMA-Factory ever had, set alone: what they drop, overwrite or refuse themselves, and what a plan
has no word for. Each failed before."""

from pathlib import Path

import pytest
from import_files import asked_for, written

from planner.errors import PlannerError
from planner.layout import CpMethod
from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given

AXOLOTL = (
    "base_model: Qwen/Qwen3-8B\ndatasets: [{path: a}]\nsequence_len: 2048\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\n"
)
ADAPTERS = "adapter: lora\nlora_r: 16\nlora_target_linear: true\n"
FACTORY = (
    "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\ndo_train: true\nfinetuning_type: lora\ncutoff_len: 2048\ntemplate: qwen3\n"
    "per_device_train_batch_size: 2\nbf16: true\n"
)
LIGER = "plugins: [axolotl.integrations.liger.LigerPlugin]\n"
CCE = "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n"
FSDP = "fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n"


def found_in(folder: Path, text: str, gpus: int = 1, **said: str) -> Reading:
    return read(written(folder, text), None, Given(num_gpus=gpus, settings=said))


@pytest.mark.parametrize(("more", "precision"), [
    ("", "bf16"), ("fp16: true\n", "fp16"), ("bf16: auto\nfp16: true\n", "fp16"), ("bf16:\nfp16: true\n", "fp16"),
    ("bf16:\n", "fp32"), ("bf16: false\n", "fp32"), ("bf16: full\n", "bf16"), ("bf16: true\nfp16: true\n", "bf16"),
])  # fmt: skip
def test_bf16_of_axolotl_is_auto_and_gives_way(tmp_path: Path, more: str, precision: str) -> None:
    assert found_in(tmp_path, AXOLOTL + ADAPTERS + more).precision == precision


def test_full_bf16_is_no_mixed_precision(tmp_path: Path) -> None:
    sharded = "fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_offload_params: false}\n"
    assert found_in(tmp_path, AXOLOTL + sharded + "bf16: full\n", 8).precision == "bf16_true"
    assert found_in(tmp_path, AXOLOTL + sharded + "bf16: true\n", 8).precision == "bf16"


@pytest.mark.parametrize(("more", "kernel", "note"), [
    ("eager_attention: true\n", "eager", ""), ("sdp_attention: true\n", "best", ""), ("flash_attention: true\n", "fa2", ""),
    ("xformers_attention: true\nflash_attention: true\n", "", "attention by xformers is priced as flash attention"),
    ("flex_attention: true\n", "", "attention by flex_attention is priced"),
    ("s2_attention: true\n", "best", "s2_attention: priced as"), ("flash_attention: false\n", "best", "uses sdpa"),
])  # fmt: skip
def test_switches_of_attention(tmp_path: Path, more: str, kernel: str, note: str) -> None:
    found = found_in(tmp_path, AXOLOTL + ADAPTERS + more)
    assert ("attention_kernel" in found.trainer) == bool(kernel) and found.trainer.endswith(kernel)
    assert note in " ".join(found.notes)


@pytest.mark.parametrize(("more", "fused", "note"), [
    (f"{LIGER}liger_fused_linear_cross_entropy: true\n", True, ""),
    ("liger_fused_linear_cross_entropy: true\n", False, "counts with LigerPlugin"), (CCE, True, ""),
    (f"{CCE}cut_cross_entropy: false\n", False, ""), ("chunked_cross_entropy: true\n", False, "priced as the loss of torch"),
    ("plugins: [own.Plugin]\n", False, "plugin own.Plugin is not read"),
])  # fmt: skip
def test_a_setting_of_a_plugin_counts_with_it_alone(tmp_path: Path, more: str, fused: bool, note: str) -> None:
    found = found_in(tmp_path, AXOLOTL + ADAPTERS + more)
    assert ("loss=fused_linear" in found.trainer, note in " ".join(found.notes)) == (fused, True)


@pytest.mark.parametrize(("more", "words"), [
    ("relora_steps: 150\n", "restarts of adapters"), ("peft_layer_replication: [[0, 16]]\n", "layers that are repeated"),
    ("plugins: [axolotl.integrations.spectrum.SpectrumPlugin]\n", "training some of the weights"), ("use_mora: true\n", "MoRA"),
    ("plugins: [axolotl.integrations.kd.KDPlugin]\n", "distillation"), ("grokfast_alpha: 0.9\n", "an average of the gradients"),
    ("model_type: AutoModelForSequenceClassification\n", "a classifier is no language model"),
])  # fmt: skip
def test_what_no_plan_has_is_refused(tmp_path: Path, more: str, words: str) -> None:
    with pytest.raises(PlannerError, match=words):
        found_in(tmp_path, AXOLOTL + ADAPTERS + more)


@pytest.mark.parametrize("word", ["load_in_4bit", "load_in_8bit", "gptq"])
def test_weights_in_fewer_bits_need_an_adapter(tmp_path: Path, word: str) -> None:
    with pytest.raises(PlannerError, match=f"{word}: weights in fewer bits without an adapter"):
        found_in(tmp_path, f"{AXOLOTL}{word}: true\n")
    frozen = {"load_in_8bit": "int8", "gptq": "nf4"}.get(word, "nf4_dq")
    adapters = ADAPTERS.replace("adapter: lora", "adapter: qlora") if frozen == "nf4_dq" else ADAPTERS
    assert found_in(tmp_path, f"{AXOLOTL}{adapters}{word}: true\n").frozen_weights == frozen


def test_what_axolotl_does_not_start_without_is_asked_in_one_message(tmp_path: Path) -> None:
    text = AXOLOTL + "adapter: qlora\nlora_r: 8\nselective_checkpointing: true\noverrides_of_model_config: {num_hidden_layers: 2}\n"
    found = found_in(tmp_path, text)
    assert asked_for(found) == ["load_in_4bit", "lora_target_linear", "selective_checkpointing", "--model NAME"]
    answers = {"load_in_4bit": "true", "lora_target_linear": "true", "selective_checkpointing": "false"}
    said = read(written(tmp_path, text), None, Given(num_gpus=1, model="qwen3-8b", settings=answers))
    assert (asked_for(said), said.frozen_weights) == ([], "nf4_dq")


def test_words_of_adapters_without_an_adapter_are_named(tmp_path: Path) -> None:
    found = found_in(tmp_path, AXOLOTL + "lora_r: 16\n")
    assert found.lora_rank == 0 and "adapter is not set, so all weights are trained" in " ".join(found.notes)
    both = found_in(tmp_path, AXOLOTL + ADAPTERS + "lora_target_modules: [q_proj, v_proj]\n")
    assert (both.lora_targets, "alone are priced" in " ".join(both.notes)) == ("all", False)


@pytest.mark.parametrize(("more", "group"), [
    ("", None), ("dp_replicate_size: 2\n", 4), ("dp_shard_size: 2\n", 2), ("dp_shard_size: 8\n", None),
    ("tensor_parallel_size: 2\ndp_replicate_size: 2\n", 2),
])  # fmt: skip
def test_what_one_of_shards_and_replicas_leaves_is_the_other(tmp_path: Path, more: str, group: int | None) -> None:
    assert found_in(tmp_path, AXOLOTL + FSDP + more, 8).fields.get("dp_shard") == group


def test_the_batch_of_axolotl_is_that_of_a_rank(tmp_path: Path) -> None:
    text = AXOLOTL.replace("gradient_accumulation_steps: 4", "batch_size: 16")
    found = found_in(tmp_path, text + "deepspeed: deepspeed_configs/zero3.json\n", 4)
    assert (found.fields["num_microbatches"], found.global_batch_size) == (8, 64)


def test_the_ring_that_a_file_names(tmp_path: Path) -> None:
    cut = "context_parallel_size: 2\nsample_packing: true\n"
    assert found_in(tmp_path, AXOLOTL + FSDP + cut, 8).fields["cp_method"] == int(CpMethod.ALLGATHER)
    ring = found_in(tmp_path, f"{AXOLOTL}{FSDP}{cut}ring_attn_func: batch_ring\n", 8)
    assert ring.fields["cp_method"] == int(CpMethod.ALLGATHER)
    assert "is a ring (ring_attn_func batch_ring), priced as gathered keys and values: the last ranks" in " ".join(ring.notes)
    found = found_in(tmp_path, AXOLOTL + cut + "deepspeed: deepspeed_configs/zero3.json\n", 8)
    assert "ring-flash-attn over DeepSpeed is priced as Ulysses" in " ".join(found.notes)


def test_processes_of_ray_and_batches_that_are_split(tmp_path: Path) -> None:
    found = read(written(tmp_path, AXOLOTL + "use_ray: true\nray_num_workers: 4\n"), None, Given())
    assert found.num_gpus == 4
    split = "accelerator_config: {split_batches: true}\n"
    halved = found_in(tmp_path, AXOLOTL + split + "deepspeed: deepspeed_configs/zero3.json\n", 2)
    assert (halved.fields["micro_batch_size"], halved.global_batch_size) == (1, 8)


@pytest.mark.parametrize(("name", "states"), [
    ("optimi_adamw", "adam"), ("ao_adamw_8bit", "adam_8bit"), ("schedule_free_adamw", "adam"), ("lion_pytorch", "lion"),
])  # fmt: skip
def test_optimizers_of_axolotl(tmp_path: Path, name: str, states: str) -> None:
    found = found_in(tmp_path, f"{AXOLOTL}{ADAPTERS}optimizer: {name}\n")
    assert (found.optimizer, found.questions) == (states, ())


@pytest.mark.parametrize(
    "more", ["tiled_mlp: true\n", "gpu_memory_limit: 20\n", "auto_find_batch_size: true\n", "activation_offloading: true\n"]
)
def test_what_a_plan_leaves_out_is_named(tmp_path: Path, more: str) -> None:
    text = AXOLOTL + ADAPTERS + "gradient_checkpointing: true\n" + more
    assert more.partition(":")[0] in " ".join(found_in(tmp_path, text).notes)


def test_a_configuration_beside_the_weights_says_what_is_built(tmp_path: Path) -> None:
    text = AXOLOTL.replace("Qwen/Qwen3-8B", "/data/own") + "base_model_config: Qwen/Qwen3-8B\n"
    assert found_in(tmp_path, text).model_name == "Qwen/Qwen3-8B"


# ------------------------------------------------------------------------------------------------------------- LLaMA-Factory


@pytest.mark.parametrize("word", ["resize_vocab: true", "add_special_tokens: <a>", "new_special_tokens: <a>"])
def test_rows_that_are_added_train_the_tables(tmp_path: Path, word: str) -> None:
    found = found_in(tmp_path, f"{FACTORY}{word}\n")
    assert (found.lora_whole, "embedding and head are trained as a whole" in " ".join(found.notes)) == ("both", True)
    named = found_in(tmp_path, f"{FACTORY}{word}\nadditional_target: embed_tokens\n")
    assert named.lora_whole == "embedding"


@pytest.mark.parametrize(("more", "words"), [
    ("finetuning_type: full\nquantization_bit: 4\n", "weights in 4 bits are not trained"),
    ("quantization_bit: 3\n", "3 bits are not"),
    ("do_train: false\ndo_eval: true\n", "do_eval without do_train"), ("use_megatron_bridge: true\n", "over Megatron-Bridge"),
])  # fmt: skip
def test_what_llama_factory_does_not_start_is_refused(tmp_path: Path, more: str, words: str) -> None:
    text = "".join(one for one in FACTORY.splitlines(True) if one.partition(":")[0] not in more)
    with pytest.raises(PlannerError, match=words):
        found_in(tmp_path, text + more)


@pytest.mark.parametrize(("more", "kernel", "note"), [
    ("flash_attn: disabled\n", "eager", ""), ("flash_attn: true\n", "fa2", ""), ("flash_attn: auto\n", "", ""),
    ("flash_attn: fa3\n", "", "attention by fa3 is priced"), ("shift_attn: true\n", "", "shift_attn: priced as whole attention"),
])  # fmt: skip
def test_attention_of_llama_factory(tmp_path: Path, more: str, kernel: str, note: str) -> None:
    found = found_in(tmp_path, FACTORY + more)
    assert ("attention_kernel" in found.trainer, found.trainer.endswith(kernel)) == (bool(kernel), True)
    assert note in " ".join(found.notes)


def test_the_loss_kernel_needs_a_step_without_logits(tmp_path: Path) -> None:
    assert "loss=fused_linear" in found_in(tmp_path, FACTORY + "enable_liger_kernel: true\n").trainer
    text = FACTORY.replace("stage: sft", "stage: dpo") + "enable_liger_kernel: true\nref_model: Qwen/Qwen3-8B\n"
    found = found_in(tmp_path, text)
    assert "loss=" not in found.trainer and "ref_model: a model of its own" in " ".join(found.notes)


def test_lengths_of_before_cutoff_len(tmp_path: Path) -> None:
    text = FACTORY.replace("cutoff_len: 2048", "max_source_length: 512\nmax_target_length: 256")
    assert found_in(tmp_path, text).sequence_length == 768
    assert found_in(tmp_path, text.replace("stage: sft", "stage: pt")).sequence_length == 512


def test_settings_of_what_is_off_change_nothing(tmp_path: Path) -> None:
    """LLaMA Board writes all of them."""
    off = "galore_rank: 16\nbadam_mode: layer\napollo_scale: 32.0\nfreeze_trainable_layers: 2\nexport_quantization_bit: 4\n"
    found = found_in(tmp_path, FACTORY + off + "use_cache: true\n")
    assert (found.questions, found.unread) == ((), ())


def test_a_compiled_model_of_llama_factory(tmp_path: Path) -> None:
    assert "compile=on" in found_in(tmp_path, FACTORY + "torch_compile_mode: max-autotune\n").trainer
    found = found_in(tmp_path, FACTORY + "torch_compile: true\ndeepspeed: ds_z2_autotp_config.json\n", 8)
    assert (found.fields["zero"], found.fields["tp"]) == (2, 2)
    assert "torch_compile is not priced over DeepSpeed" in " ".join(found.notes)


def test_tables_beside_adapters_of_plugins(tmp_path: Path) -> None:
    text = "model: Qwen/Qwen3-0.6B\nmodel_class: llm\ntrain_dataset: a\nmicro_batch_size: 1\ndist_config: {name: fsdp2}\n"
    found = found_in(tmp_path, text + "peft_config: {name: lora, modules_to_save: [embed_tokens]}\n")
    assert (found.lora_whole, found.unread) == ("embedding", ())
