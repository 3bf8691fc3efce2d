"""``plan run``: a job that goes on when machines fail, are taken away and come back; checkpoint folders of trainers.

Order of the modules, each imports from its own line and from those above:

    inert_pickle  run_flags  attempt
    checkpoint_folder  worlds  notices
    same_tensors  loop
    reshard
    command
"""
