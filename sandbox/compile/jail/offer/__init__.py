"""What a candidate may import besides the DSL and numpy: the package `kernelgen` in this folder, first on its path."""
