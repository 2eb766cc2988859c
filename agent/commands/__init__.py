"""The commands of `kernelgen`, by group. They parse, call, render and choose the exit code; no
logic lives here.
"""
