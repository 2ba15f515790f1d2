"""openai-whisper's own model class with the weights of a checkpoint."""

import torch
import whisper.model

from whisperport.model.checkpoint import Checkpoint


def openai_original(checkpoint: Checkpoint) -> whisper.model.Whisper:
    """openai-whisper's own class with the checkpoint's weights and alignment heads, in float32."""
    dims = checkpoint.dims
    model = whisper.model.Whisper(
        whisper.model.ModelDimensions(
            dims.n_mels,
            dims.n_audio_ctx,
            dims.n_audio_state,
            dims.n_audio_head,
            dims.n_audio_layer,
            dims.n_vocab,
            dims.n_text_ctx,
            dims.n_text_state,
            dims.n_text_head,
            dims.n_text_layer,
        )
    )
    weights = {name: weight.float() for name, weight in checkpoint.weights.items()}
    model.load_state_dict(weights, strict=False)
    heads = torch.zeros(dims.n_text_layer, dims.n_text_head, dtype=torch.bool)
    for layer, head in checkpoint.generation.alignment_heads:
        heads[layer, head] = True
    model.register_buffer("alignment_heads", heads.to_sparse(), persistent=False)
    return model.eval()
