"""Experts: their kernels, and how tokens reach experts on other devices and come back."""
