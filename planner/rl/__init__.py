"""RL post-training: one step of generation, log-probs, training and weight sync on one or two pools of GPUs.

From the ground up; a module imports from its own line and from lines above:

    answer_lengths rl_layout            lengths of answers; where the models live and how each is split
    rl_workload rl_framework            what is asked of a step; what a framework does in it, as versioned data
    generation packing training_phase weight_sync memory_switch       the phases
    rl_estimate rl_plan                 all phases together; the plan file
    rl_search published                 every placement; published runs

It stands on serving (generation) and on the cost model of training.
"""
