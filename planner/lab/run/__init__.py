"""Runs a plan with PyTorch alone, really or on fake tensors, or with its trainer, and compares what happens with the prediction.

A module imports from its own line and from lines above it:

    record levels learn shrink                                                  the task, and what a record holds and teaches
    kernel_trace outcome eager_pricing assembled_step comparison              what is predicted of a run
    host_states serial_rounding serial_model fake_tensors memory_tracker tensor_parallel   what one rank is made of (torch)
    training clock parity rate fake_collectives                          one rank
    depth workers meta full_result full_rank full emulate one_rank truncated     the levels
    trainer_run show request mixed_stages command              trainers, finalists, stages of mixed plans, the command
"""
