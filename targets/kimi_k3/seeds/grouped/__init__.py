"""Kimi K3 for many tokens, one launch per operation: each weight is read for many tokens at once.

Routed experts run over a list of (expert, up to eight pairs), dense products over tiles of sixteen rows and all tokens.
What is not here is the seeds'; `persistent.source` bundles both. Nothing here imports CuTe DSL.
"""
