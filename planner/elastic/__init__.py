"""Elastic jobs: machines fail, are taken away, slow down and come back; what to save, where to go on, and what that costs.

Order of the modules: each imports from its own line and from lines above.

    checkpoints failure_rates shards spares prometheus seen_tables expert_placement  intervals, rates, boxes, Poisson, endpoints
    availability best_layout engine_recipes gpu_states  traces, searches, who reads a checkpoint into another layout
    elastic_job moves observed fewer_nodes worlds_between  a plan with its surroundings; bytes of a move; what a job shows
    failure_answers move_costs stragglers published_job  shares of the wall time; seconds of a move; who is slow
    resilience reshape published  the questions, and answers to published runs
"""
