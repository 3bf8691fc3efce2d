"""The transformer that a plan describes, as torch modules: what the profiler times by the layer and the validator runs."""
