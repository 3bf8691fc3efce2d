"""Training on several kinds of nodes and several sites: each stage on its own GPU, each replica with its own share."""
