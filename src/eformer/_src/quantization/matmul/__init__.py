"""The path of `x @ q`, file by file.

`dot_general` has its rule, which turns its operands into stacks of matrices. `primitive` is the matmul of stacks, with
its derivative. `lowering` chooses the kernel. `tiles` is the matmul in XLA's operations, where there is no kernel.
`partitioning` and `inferred_mesh` divide the work over devices. `ragged` and `convolution` make matmuls of other
primitives. `fuse` makes one operation of matmuls that share x, which is in `several`.
"""
