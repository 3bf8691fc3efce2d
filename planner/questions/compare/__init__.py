"""Plans side by side, and what each difference does."""
