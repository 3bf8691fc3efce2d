"""The cost model: pure functions from (workload, cluster, trainer, layout) to time and memory.

Symbols, the same in every file and in docs/cost-model.md:

    L layers        h hidden size      a query heads     k key-value heads   d head dimension
    f MLP width     V vocabulary       E experts         K experts per token
    s sequence      b micro batch      m microbatches    B global batch
    t tp            p pp               c cp              e ep                v vpp

    T = b s / c     tokens of one microbatch on one context-parallel rank
    T_s             tokens per rank where norms and residuals work: T / t with sequence parallelism, else T

A layout of N candidates gives columns of length N. Quantities that differ by pipeline stage have a trailing axis of
three: first, a middle one (the second), last. With one stage all three are the whole model; with two the middle one
repeats the first.
"""
