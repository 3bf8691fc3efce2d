"""Peak memory of one training step of a class of transformers, on fake tensors: nothing is allocated or computed.

The step is that of transformers' Trainer on one GPU: forward under autocast, outputs in fp32 as accelerate gives them out, the loss
alone kept, backward, AdamW of torch (foreach). The processor's autocast is used, with the list of operations that CUDA's runs in
fp32 beside it; attention is torch's flash kernel, or the eager one of the class.  [torch, autocast_mode.h: AT_FORALL_FP32]
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from accelerate.utils import convert_outputs_to_fp32
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

FP32 = {
    torch.pow, torch.Tensor.pow, torch.Tensor.__pow__, torch.exp, torch.Tensor.exp, torch.log, torch.Tensor.log, torch.softmax,
    functional.softmax, torch.Tensor.softmax, functional.log_softmax, torch.log_softmax, functional.layer_norm, torch.layer_norm,
    torch.sum, torch.Tensor.sum, torch.prod, torch.cumsum, torch.Tensor.cumsum, torch.rsqrt, torch.Tensor.rsqrt,
    functional.softplus, functional.cross_entropy, functional.nll_loss, torch.norm, torch.Tensor.norm,
}  # fmt: skip
"""Operations that autocast of CUDA runs in fp32 and that of the processor does not."""
RANDOM = ("uniform_", "normal_", "trunc", "erfinv_", "bernoulli_")
"""Initialisation, which fake tensors need not."""


class Autocast(TorchFunctionMode):
    """Brings what those operations are given to fp32, where autocast is on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FP32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = pytree.tree_map(_wide, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value


class Storages(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, and the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(one in str(func) for one in RANDOM):
            return args[0]
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, FakeTensor):
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._alive.pop(key, 0)


def _flash(module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 0.0, scaling: Any = None, **_: Any) -> Any:
    wide = value.shape[-1]
    value = functional.pad(value, (0, query.shape[-1] - wide))
    out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout, True, False, scale=scaling)[0]
    return out[..., :wide].transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def _on_fakes(patch: pytest.MonkeyPatch) -> Iterator[Storages]:
    patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "counted", _flash)
    patch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "counted", lambda *_, **__: None)
    patch.setattr(transformers.PreTrainedModel, "initialize_weights", lambda _: None)
    patch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)  # adapters are made where they belong
    counted = Storages()
    with FakeTensorMode(allow_non_fake_inputs=True), counted, torch.device("cpu"), Autocast():
        yield counted


@dataclass
class Case:
    """A job: configuration of the model, how it is trained, and the shape of its batch."""

    config: dict[str, Any]
    dtype: str = "bfloat16"
    adapters: bool = False
    recompute: bool = False
    eager: bool = False
    batch: int = 4
    length: int = 2048


def peak(case: Case) -> int:
    """Most bytes of the second of two steps, in which optimizer states exist from the start."""
    config = transformers.AutoConfig.for_model(**case.config)
    dtype = getattr(torch, case.dtype)
    with pytest.MonkeyPatch.context() as patch, _on_fakes(patch) as counted:
        kernel = "eager" if case.eager else "counted"
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=kernel, dtype=dtype).train()
        if case.adapters:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
        if case.recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if case.adapters:
                model.enable_input_require_grads()
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], foreach=True)
        for _ in range(2):
            gc.collect()
            counted.most = counted.now
            tokens = torch.zeros(case.batch, case.length, dtype=torch.long)
            _loss(model, tokens).backward()
            gc.collect()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return counted.most


def _loss(model: Any, tokens: Any) -> Any:
    """Trainer.compute_loss over accelerate's prepare_model."""

    def forward(**words: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**words)

    count = torch.tensor(float(tokens.numel()))
    return convert_outputs_to_fp32(forward)(input_ids=tokens, labels=tokens, use_cache=False, num_items_in_batch=count)["loss"]
