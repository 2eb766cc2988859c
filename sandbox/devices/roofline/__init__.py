"""What this GPU can do, measured by kernels of our own: copies, L2, gaps between launches, barriers and flags.

`measure.measure` gives the facts, `measure.remember` keeps them beside the streaming rate. No candidate code runs.
"""
