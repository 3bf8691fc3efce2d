"""Published serving runs: read, brought to what an estimate takes, predicted."""
