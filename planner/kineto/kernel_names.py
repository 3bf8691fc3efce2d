"""What a kernel does, by its name: CUDA and ROCm name their libraries' kernels in ways that are stable enough for families."""

import re
from functools import lru_cache

GEMM, ATTENTION, ELEMENTWISE, OPTIMIZER, OTHER, COMMUNICATION, COPY = range(7)
FAMILIES = (
    "matrix products",
    "attention",
    "norms and elementwise",
    "optimizer",
    "other kernels",
    "communication",
    "copies",
)
"""Names of the families, in the order of their numbers."""
COMPUTING = (GEMM, ATTENTION, ELEMENTWISE, OPTIMIZER, OTHER)
_PATTERNS = (
    (COMMUNICATION, r"nccl|rccl|deep_ep|nvshmem|mscclpp|userbuffers|multimem_|(one|two)_shot_all_reduce|cross_device_reduce"),
    (COPY, r"^(memcpy|memset)"),
    (ATTENTION, r"flash|fmha|attention|attn|sdpa|ring_attn|mla_"),
    (OPTIMIZER, r"multi_tensor_apply|adam|lamb_|adagrad|muon|l2norm|distributedfused"),
    # hipBLASLt and Tensile: Cijk_; cuBLASLt on Hopper and later: nvjet; a GEMV is a thin GEMM
    (GEMM, r"gemm|gemv|cijk_|nvjet|cutlass|cublas|xmma|wgmma|splitk|_mm(_|$)|matmul|dot_kernel|^(volta|ampere)_.*_(nn|nt|tn)"),
    (ELEMENTWISE, r"elementwise|norm|softmax|reduce|triton_|rope|rotary|swiglu|silu|gelu|dropout|embedding|index|entropy|nll_|"
                  r"fill|cat|copy|transpose|permute|cast|quantize|scale|topk|sort|scatter|gather|scan|cumsum|foreach|arange|mask"),
)  # fmt: skip
_COMPILED = tuple((family, re.compile(pattern, re.IGNORECASE)) for family, pattern in _PATTERNS)
_OPS = (
    ("all_reduce", r"all_?reduce"), ("reduce_scatter", r"reduce_?scatter"), ("all_gather", r"all_?gather"),
    ("all_to_all", r"all_?to_?all|deep_ep|dispatch|combine"), ("send_recv", r"send|recv"),
    ("broadcast", r"broadcast"), ("reduce", r"reduce"), ("gather", r"gather"), ("scatter", r"scatter"), ("barrier", r"barrier"),
)  # fmt: skip
_OPS_COMPILED = tuple((op, re.compile(pattern, re.IGNORECASE)) for op, pattern in _OPS)
BYTES = {
    "byte": 1, "char": 1, "bool": 1, "int8": 1, "uint8": 1, "short": 2, "half": 2, "bfloat16": 2, "float16": 2, "int": 4,
    "float": 4, "long": 8, "double": 8,
}  # fmt: skip
"""Bytes of an element by torch's names of scalar types, in small letters; names that begin with float8 have 1."""
LONGEST = 300
"""Characters of a name that are looked at; templates go on for thousands."""


@lru_cache(maxsize=1 << 16)
def family_of(name: str) -> int:
    """Family of a kernel."""
    return next((family for family, pattern in _COMPILED if pattern.search(name[:LONGEST])), OTHER)


@lru_cache(maxsize=4096)
def op_of(name: str) -> str:
    """The collective of a NCCL kernel's name, or of c10d's (_allgather_base), in the words of nccl-tests; '' = unknown."""
    return next((op for op, pattern in _OPS_COMPILED if pattern.search(name[:LONGEST])), "")


def element_bytes(dtype: object) -> float:
    """Bytes of an element; nan for a name that is not known."""
    word = str(dtype).lower()
    return 1.0 if word.startswith("float8") else float(BYTES.get(word, "nan"))


def short_name(name: str) -> str:
    """A kernel's name without namespaces, template and call arguments, 60 characters at most."""
    plain = re.sub(r"^void\s+", "", name[:LONGEST])
    plain = re.sub(r"\(anonymous namespace\)::", "", plain)
    first, _, rest = plain.replace("(", "<").partition("<")
    word = first.split("::")[-1].strip()
    if word.lower() in ("kernel", "device_kernel", "kernel2") and rest:  # cutlass::Kernel<what it is>
        word = re.split(r"[<>,()]", rest, maxsplit=1)[0].split("::")[-1].strip() or word
    return (word or plain)[:60]
