"""Read Whisper checkpoints of all supported formats into a `Checkpoint`.

load -> huggingface (config, weight_files, tokenizer_files, generation_settings)
     -> openai (pickled_file)
     -> ctranslate2 (ctranslate2_file), ggml
     -> adapter, merged with a base that is loaded as one of these
     -> tensor_check -> Checkpoint
"""

from whisperport.model.checkpoint.checkpoint import Checkpoint, Source
from whisperport.model.checkpoint.load import load_checkpoint

__all__ = ["Checkpoint", "Source", "load_checkpoint"]
