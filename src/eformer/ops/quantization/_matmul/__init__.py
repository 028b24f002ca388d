"""The path of `x @ q`, in the order of the files.

`_rule` is asked for `dot_general` and brings the operands into stacks of matrices, `_primitive` is the matmul of
stacks with its derivatives, `_lowering` chooses the kernel, and `_tiles` is the matmul where there is none.
`_partitioning` and `_inferred_mesh` divide the work over devices. `_operand` is what a format declares for all that.
"""
