"""From a file's bytes to the tensors of one layer, ready for the lanes."""
