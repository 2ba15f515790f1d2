"""The programs for targets made for images: the encoder on one row, and `decode_full`."""

import torch

from whisperport.model.full_decoder import FullDecoder
from whisperport.model.image_encoder import ImageEncoder
from whisperport.model.whisper import Whisper
from whisperport.programs.program import Program, trace
from whisperport.spec import FullForm


def image_encoder(model: Whisper) -> Program:
    """`encoder`, whose spectrogram is an image of one row: mel (1, n_mels, 1, 2T) to (1, T, d)."""
    mel = torch.zeros(1, model.dims.n_mels, 1, model.dims.n_frames)
    return trace("encoder", ImageEncoder(model.encoder), (mel,), ["features"])


def decode_full(model: Whisper, form: FullForm) -> Program:
    """`decode_full`: the features, then the embeddings, to the logits of each piece."""
    dims = model.dims
    features = torch.zeros(1, dims.n_audio_ctx, dims.n_audio_state)
    embeddings = torch.zeros(1, dims.n_text_state, *form.layout)
    names = [f"logits_{piece}" for piece in range(form.pieces)]
    return trace("decode_full", FullDecoder(model.decoder, form), (features, embeddings), names)
