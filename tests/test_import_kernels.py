"""Kernels that a configuration names and that count for some models, or on some machines, alone."""

import json
from pathlib import Path

import pytest
from import_files import written

from planner.trainers.reading import read
from planner.trainers.reading.configuration import Reading
from planner.trainers.reading.given import Given
from planner.trainers.reading.kernels import class_of, patched
from planner.trainers.reading.unsloth_parts import scores_of_unsloth

TRL = (
    "trust_remote_code: {}\ndataset_name: some/data\nbf16: true\nmax_length: 2048\nper_device_train_batch_size: 2\npacking: true\n"
    "gradient_accumulation_steps: 4\ngradient_checkpointing: true\nuse_liger_kernel: true\nmodel_name_or_path: "
)
FACTORY = (
    "stage: sft\ndo_train: true\nfinetuning_type: full\ncutoff_len: 2048\nbf16: true\nper_device_train_batch_size: 2\n"
    "dataset: own\nenable_liger_kernel: true\ntemplate: default\ndeepspeed: null\nmodel_name_or_path: "
)
SWIFT = "swift sft --tuner_type full --max_length 2048 --per_device_train_batch_size 2 --use_liger_kernel true --model "


def _config(tmp_path: Path, **more: object) -> str:
    sizes = {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 32000, "tie_word_embeddings": False, "model_type": "llama",
        "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "of").mkdir(exist_ok=True)
    return str(written(tmp_path, json.dumps({**sizes, **more}), "of/config.json"))


def _read(tmp_path: Path, text: str, name: str = "sft.yaml", model: str | None = None) -> Reading:
    return read(written(tmp_path, text, name), None, Given(num_gpus=1, model=model, settings={"fsdp": "no_shard"}))


@pytest.mark.parametrize(("name", "remote", "fused", "note"), [
    ("Qwen/Qwen2.5-7B-Instruct", "true", True, ""), ("someone/my-llama-tuned", "true", True, ""),
    ("facebook/opt-6.7b", "false", False, "does not fuse the loss of 'facebook/opt-6.7b'"),
    ("owner/newmodel-1b", "true", False, "--set trust_remote_code=false prices its loss"),
    ("owner/newmodel-1b", "false", True, "priced for 'owner/newmodel-1b'; it counts for models that Liger patches"),
])  # fmt: skip
def test_liger_counts_for_models_that_it_patches(tmp_path: Path, name: str, remote: str, fused: bool, note: str) -> None:
    found = _read(tmp_path, TRL.format(remote) + name)
    assert ("loss=fused_linear" in found.trainer, "loss=full" in found.trainer) == (fused, not fused)
    said = [one for one in found.notes if "iger" in one]
    assert (note in " ".join(said)) and bool(said) == bool(note)


@pytest.mark.parametrize(("name", "fused"), [
    ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", True), ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", True),
    ("Qwen/Qwen-7B-Chat", False), ("/models/Qwen-14B-Chat", False), ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", True),
    ("deepseek-ai/DeepSeek-R1-0528", False),
    ("open-r1/OpenR1-Qwen-7B", True), ("Skywork/Skywork-OR1-7B", True), ("Skywork/Skywork-13B-base", False), ("Qwen/QwQ-32B", True),
    ("moonshotai/Kimi-Dev-72B", True), ("moonshotai/Kimi-K2-Instruct", False), ("internlm/OREAL-7B", None),
    ("internlm/internlm2_5-7b-chat", False), ("/data/internlm/Qwen2.5-7B/checkpoint-100", True), ("Qwen/Qwen2.5-Omni-7B", False),
    ("mistralai/Mamba-Codestral-7B-v0.1", False), ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", False),
    ("zai-org/GLM-4.5V", True),
    ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", False), ("nvidia/AceReason-Nemotron-7B", True), ("microsoft/phi-1_5", False),
    ("microsoft/Phi-4-mini-instruct", True), ("microsoft/Phi-4-multimodal-instruct", False), ("google/gemma-3n-E4B-it", False),
    ("tiiuae/falcon-11B", False), ("tiiuae/Falcon3-7B-Base", True), ("baichuan-inc/Baichuan-M2-32B", True),
    ("databricks/dolly-v2-7b", False), ("cerebras/Cerebras-GPT-13B", False), ("ibm-granite/granite-20b-code-base", False),
    ("ibm-granite/granite-8b-code-base", True), ("stabilityai/stablelm-zephyr-3b", False), ("Salesforce/codegen25-7b-multi", True),
])  # fmt: skip
def test_liger_goes_by_the_family_that_a_name_ends_with(name: str, fused: bool | None) -> None:
    assert patched(name) is fused


@pytest.mark.parametrize(("name", "layers", "joint"), [
    ("tiiuae/falcon-11B", "query_key_value", 2), ("databricks/dolly-v1-6b", "", 0), ("EleutherAI/pythia-1b", "query_key_value", 2),
    ("microsoft/phi-4", "", 3), ("microsoft/Phi-4-multimodal-instruct", "", 0), ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "", 0),
    ("Qwen/Qwen-7B-Chat", "c_attn", 2), ("internlm/OREAL-7B", "", 0), ("baichuan-inc/Baichuan-M2-32B", "", 0),
])  # fmt: skip
def test_layers_of_a_class_by_the_name_of_the_model(name: str, layers: str, joint: int) -> None:
    assert (class_of(name).get("peft", ""), class_of(name).get("joint", 0)) == (layers, joint)


@pytest.mark.parametrize(("name", "own"), [
    ("mistralai/Mixtral-8x7B-v0.1", False), ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", False), ("Qwen/QwQ-32B", True),
    ("mistralai/Mistral-7B-v0.3", True), ("google/gemma-7b-it", True), ("google/medgemma-27b-text-it", False),
    ("meta-llama/Llama-3.2-11B-Vision", False), ("lmsys/vicuna-7b-v1.5", True), ("Qwen/Qwen2-57B-A14B", False),
])  # fmt: skip
def test_models_whose_step_unsloth_has_written(name: str, own: bool) -> None:
    assert bool(scores_of_unsloth(["os.environ['UNSLOTH_COMPILE_DISABLE'] = '1'"], name)) is not own


@pytest.mark.parametrize(("name", "model", "fused", "note"), [
    ("owner/newmodel-7b", "qwen2.5-7b", True, ""),
    ("owner/newmodel-7b", "olmoe-1b-7b", False, "the loss of 'olmoe-1b-7b', by its name"),
    ("internlm/internlm2-chat-20b", "qwen2.5-14b", True, "it counts for models that Liger patches alone"),
])  # fmt: skip
def test_liger_counts_by_the_model_that_is_answered(tmp_path: Path, name: str, model: str, fused: bool, note: str) -> None:
    found = _read(tmp_path, TRL.format("false") + name, model=model)
    said = [one for one in found.notes if "iger" in one]
    assert ("loss=fused_linear" in found.trainer, bool(said)) == (fused, bool(note)) and note in " ".join(said)


@pytest.mark.parametrize(("keys", "fused"), [
    ({}, True), ({"model_type": "stablelm"}, False), ({"auto_map": {"AutoModel": "modeling_own.Own"}}, False),
    ({"model_type": "Unknown", "bias": True}, False),
])  # fmt: skip
def test_liger_counts_by_the_config_of_the_model(tmp_path: Path, keys: dict[str, object], fused: bool) -> None:
    _config(tmp_path, **keys)
    found = _read(tmp_path, TRL.format("true") + "of")
    assert ("loss=fused_linear" in found.trainer) == fused


@pytest.mark.parametrize(("text", "file"), [(FACTORY, "a.yaml"), (SWIFT, "run.sh")])
def test_liger_of_other_trainers(tmp_path: Path, text: str, file: str) -> None:
    assert "loss=fused_linear" in _read(tmp_path, f"{text}Qwen/Qwen3-8B\n", file).trainer
    found = _read(tmp_path, f"{text}EleutherAI/pythia-6.9b\n", file)
    assert "fused_linear" not in found.trainer and "so all scores are kept" in " ".join(found.notes)


@pytest.mark.parametrize(("kernel", "noted"), [("flex_attention", True), ("flash_attention_2", False), ("sdpa", False)])
def test_attention_that_no_plan_has(tmp_path: Path, kernel: str, noted: bool) -> None:
    note = f"attention by {kernel} is priced as the kernel of the trainer's default"
    found = _read(tmp_path, f"{TRL.format('false')}Qwen/Qwen3-8B\nattn_implementation: {kernel}\n")
    assert (note in found.notes) == noted
    assert (note in _read(tmp_path, f"{SWIFT}Qwen/Qwen3-8B --attn_impl {kernel}\n", "run.sh").notes) == noted
