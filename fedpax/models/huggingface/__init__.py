"""Weights in Hugging Face folders: config.json and safetensors files.

`load` reads a folder of Llama, Mistral, Mixtral or Qwen3 shape, and `save` writes one, which the
package transformers can read. Both need `pip install "fedpax[huggingface]"`.
"""

from fedpax.models.huggingface.read_model import load, load_config, load_params
from fedpax.models.huggingface.write_model import save

__all__ = ["load", "load_config", "load_params", "save"]
