"""DistFlashAttn."""
