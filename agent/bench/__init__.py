"""Tables of measured times over rows and contexts: which workloads, one report row for each arm, text and plot.

It times nothing: the judge does.
"""
