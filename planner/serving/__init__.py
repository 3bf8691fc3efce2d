"""Serving: what a model's inference costs on a cluster, by the same rules as training.

From the ground up; a module imports from its own line and from lines above:

    traffic result serving_layout                 what is asked, what is answered, how it is split
    engine_facts engine published                 what vLLM, SGLang and TensorRT-LLM do, as versioned data; formats of models
    curves served serving_weights host_weights    measured kernels; a model in a format on a GPU behind an engine; its weights
    serving_memory serving_rules                  what fits, what may run
    linear_layers even_stages step                products of a pass by their few shapes; seconds of one forward pass
    engine_passes lock_step load                  those of one engine; requests in step; queues
    token_gaps                                    gaps between the tokens of an answer, of a flow of queues
    serving_estimate prefill_queue pools chain    both together: one pool, two pools, stages on several kinds
    intervals serve_plan                          where nine of ten runs lie; a plan and its file
    serving_inputs candidates priced_table        flags as values; splits and loads as columns; ``Priced``: deployments as columns
    serving_question                              a question with its defaults
    serving_search pool_search chain_search       what starts, as ``Priced``; its best rows, each as a ``Choice``
    serving_rows serving_reasons plan_pricing     a ``Choice`` as a plan and as a line; why it is the best; a plan priced again
    curve_basis                                   which of its kernels were measured on its device
    serving_answer one_deployment                 the best plans of a question; the one that a user states
    kinds_rows kinds_pipelines kinds_answer       nodes of several kinds: each alone, all behind a router, pools and stages on them
    fewest_gpus compared_splits serving_changes   the search asked again: fewer GPUs, stated splits, one thing changed
    export flags readback measure runs            files of servers, written and read; a running server; published runs

It shares model, hardware, cluster and errors with training; nothing of training imports it.
"""
