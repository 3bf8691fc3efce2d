"""Measures the user's own hardware and writes a hardware profile. Modules from the ground up; each imports from those before it.

What is measured: points, definitions (FLOP and bytes), patterns (groups of ranks), layer_check, compute_points.
How it runs in torch: tensors, operator_runs; rank_groups are the ranks and their collectives.
How it is timed: timing, device_timing (GPU); compute_timing, collective_timing, overlap_timing, all_ranks; worker is one rank.
What it says: fitting, fit_gemm, fit_attention, fit_compute, fit_links. The file: profile_file; command.
"""
