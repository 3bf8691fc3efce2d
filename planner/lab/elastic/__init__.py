"""``plan run``: a job that goes on when machines fail, are taken away and come back; checkpoint folders of trainers.

Order of the modules, each imports from its own line and from those above:

    inert_pickle  run_flags  attempt  notices  save_interval
    checkpoint_folder  worlds
    same_tensors  loop
    reshard  setting_up
    command
"""
