"""Serving: what a model's inference costs on a cluster, by the same rules as training.

The floors, from the ground: ``traffic`` and ``serving_layout`` (what is asked, how it is split), ``engine`` (what vLLM, SGLang and
TensorRT-LLM do, as versioned data), ``curves`` (measured kernels of decode), ``memory`` and ``rules`` (what fits, what may be),
``step`` (seconds of one forward pass), ``load`` (queues on top of steps), ``estimate`` (both together), then the questions: search,
export, import, measure. It shares model, hardware, cluster and errors with training; nothing of training imports it.
"""
