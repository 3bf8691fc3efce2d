"""A serve plan as files that start: command lines, configurations, manifests, and the benchmark that measures what was predicted.

serve_job       the plan with its hardware; pools of engines and where on the nodes each one lies
vllm_server, sglang_server, trtllm_server    words and configuration of one engine: the only places that know their flags
bench_command   the load of the plan in the words of vllm bench serve and sglang.bench_serving
dynamo, llm_d   manifests for Kubernetes around the same words
serving_folder  all files of one target, and their check against the engines' own flags
"""
