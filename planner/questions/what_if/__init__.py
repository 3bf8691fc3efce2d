"""The same job with one thing changed, and the least or the most that still does the job."""
