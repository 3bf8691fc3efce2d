"""Which measured number a choice hangs on."""
