"""RL plans as folders that a framework runs: configuration, launch script, environment, README."""
