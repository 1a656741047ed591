"""Operations of layers on arrays, with their own gradients: attention, matmuls, a loss."""
