"""`kernelgen mcp`: coding agents read the task, hand in candidates and get the judge's verdicts.

They propose and nothing else: measuring, promoting and spending stay with the run.
"""
