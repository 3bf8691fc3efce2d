"""What one layer does on one GPU: its operators and collectives, with shapes and bytes."""
