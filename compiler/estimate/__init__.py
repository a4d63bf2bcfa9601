"""What a plan predicts without a compiler: memory, communication, and the roofline of each part."""
