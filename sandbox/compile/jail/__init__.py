"""What runs inside the compile jail: standard library, numpy, llvmlite and the DSL; never the project.

The folder is bound read-only into the box and started as `python -I jail/worker.py`. Nothing here is trusted once the
candidate's source has been imported: all that leaves is a claim, checked by `sandbox.compile.claims`.
"""
