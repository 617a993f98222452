"""CUDA: compile, cache and launch kernels, and one file per engine."""
