"""The same job with one thing changed, and the other direction: the least that still does the job."""
