"""From a judged candidate to something that runs elsewhere: a bundle for plain torch, or patches for vLLM.

Nothing here judges, pushes or sends. GPU code is never loaded; machine code is made in processes of
the sandbox.
"""
