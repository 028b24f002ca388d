"""Functions of arrays: what every format stores and how it is read. Knows nothing of implicit arrays."""
