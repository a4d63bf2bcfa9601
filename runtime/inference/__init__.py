"""Opening the weights of a run or of published files, to evaluate them and to generate text from them."""
