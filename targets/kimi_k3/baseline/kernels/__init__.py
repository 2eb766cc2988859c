"""Triton kernels of the baseline `mix`: one module per kind of work. Importing them needs the triton package.

They hold no policy: which kernel runs where, with which tile, is `targets.kimi_k3.baseline.mix`'s.
"""
