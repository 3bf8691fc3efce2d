"""A running OpenAI-compatible server measured under the load of a plan, and benchmarks of others read.

stream_client    one streamed request over asyncio, with the times of its tokens
bench_prompts    what is sent: token numbers where the server takes them, else words; lengths as the plan draws them
load_driver      closed and open loop, bounded in time, stopped by Ctrl-C without losing what was measured
bench_files      results: of one's own runs, of vllm bench serve, sglang.bench_serving and InferenceX
plan_comparison  measured against predicted, at the load that was measured; what would explain the gap
"""
