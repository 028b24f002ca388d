"""The path of `x @ q`, file by file.

`_rule` serves `dot_general` and turns its operands into stacks of matrices. `_primitive` is the matmul of stacks, with
its derivative. `_lowering` chooses the kernel. `_tiles` is the matmul in XLA's operations, where there is no kernel.
`_partitioning` and `_inferred_mesh` divide the work over devices. `_ragged` and `_convolution` make matmuls of other
primitives. `_fuse` makes one operation of matmuls that share x, which is in `_several`.
"""
