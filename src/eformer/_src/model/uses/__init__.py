"""What a function does with its weights, and the rules that follow from it."""
