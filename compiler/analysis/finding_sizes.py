"""What is worth a finding on a program, and how much one says, whether the program has a plan or not."""

LEAST_BYTES = 2**20  # per execution; a smaller collective costs only latency
NUM_PLACES = 3  # places that one finding names
