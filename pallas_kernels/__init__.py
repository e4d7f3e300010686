"""Kernels of DFlash-JAX, one folder an op: api, XLA reference, named real shapes.

`implementation` is the only seam: "auto", "xla" or "pallas". "auto" takes the fastest implementation that serves the
device and the shape; an explicit choice that cannot be served is an error that says why.
"""
