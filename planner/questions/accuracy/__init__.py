"""Published runs predicted, and the errors."""
