"""Files of GGUF, read and written."""
