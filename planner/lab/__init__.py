"""Everything that needs torch: launch, reference model, profile, run."""
