"""The equations of the Kimi K3 decode step in plain torch, one module per part of a layer.

Every function takes a `Schedule` first: the oracle's float64, or a legitimate working precision. Rounding points to
BF16 that the model defines are in all of them. Nothing here is fast.
"""
