"""Reports: what was found, for people. A report never changes a number."""
