"""Operators in Triton, for any NVIDIA GPU; on a CPU they run under Triton's interpreter (TRITON_INTERPRET=1), slowly,
which is how they are tested without a GPU.

Import a module of this package only where Triton is there (`tokenspeed.kernels.registry` does so for CUDA devices).
"""
