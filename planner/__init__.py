"""Planner: how to lay out the training of a language model over GPUs, by an explained cost model."""
