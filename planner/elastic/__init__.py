"""Elastic jobs: machines fail, are taken away, slow down and come back; what to save, where to go on, and what that costs.

Order of the modules: each imports from its own line and from lines above.

    checkpoints failure_rates shards spares prometheus seen_tables expert_placement  intervals, rates, boxes, Poisson, endpoints
    availability best_layout engine_recipes gpu_states  traces, searches, who reads a checkpoint into another layout
    failing_job fewer_nodes moves observed worlds_between  what answers to a failure ask of a job; bytes of a move; what a job shows
    failure_answers stragglers  shares of the wall time; who is slow
    elastic_job mixed_elastic_job  a plan with its surroundings, of one kind of node and of several
    move_costs published_job  seconds of a move; a published row as a job
    resilience reshape published  the questions, and answers to published runs
    replays mixed_reshape  what every answer makes of a trace; other nodes of several kinds
"""
