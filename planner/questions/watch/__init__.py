"""``plan watch``: what holds a running job up, and whether another plan would pay."""
