"""Attention: its kernels, and how keys and values reach queries on other devices."""
