"""What exports share: a plan as a folder that runs, with launch scripts, environment and README."""
