"""Elastic jobs: machines fail, are taken away, slow down and come back; what to save, where to go on, and what that costs.

Order of the modules, each imports from its own line and from those above:

    checkpoints  failure_rates  shards
    saved_state  spares
    failure_answers  availability  moves
    resilience  move_costs
"""
