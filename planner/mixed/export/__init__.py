"""Plans of mixed clusters as folders that a trainer runs, and what is refused where no trainer can run one."""
