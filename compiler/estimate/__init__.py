"""Predicts memory, communication and the roofline of each part of a plan, without a compiler."""
