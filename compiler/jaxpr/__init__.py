"""A traced program as operations with sizes, FLOPs and layouts, read without a compiler."""
