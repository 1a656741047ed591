"""Operations of layers on arrays, with their own gradients: attention, matmuls, a loss.

- `ring_attention` and `splash_attention`: attention over sequences of a mesh, and on TPUs.
- `grouped_matmul` for experts, and matmuls in int8 or fp8 (`quantization`).
- `chunked_loss`: cross-entropy of large vocabularies.
- `remat`: what a layer stores for its gradient.

Users call `fedpax.models`.
"""
