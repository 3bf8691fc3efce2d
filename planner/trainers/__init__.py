"""One folder per trainer: export, check, readback, log and the terms that it alone has; facts are in profiles/trainers."""
