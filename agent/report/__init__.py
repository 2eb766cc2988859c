"""Reports of a run: one self-contained HTML file, or Markdown for a pull request.

The same views feed `kernelgen serve`. Nothing here writes to the record.
"""
