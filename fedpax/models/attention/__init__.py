"""Attention: the layer, its kernels, ring attention and splash attention."""
