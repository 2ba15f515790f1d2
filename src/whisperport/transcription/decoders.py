"""How many texts are decoded together, and the decoder of one text."""

from whisperport.runtime import Batch, Decoder, Engine, TokenSampler
from whisperport.transcription.transcribe_options import TranscribeOptions


def texts_together(
    engine: Engine, options: TranscribeOptions, sampler: TokenSampler | None = None
) -> int:
    """Return how many texts a worker decodes together: each beam of a text needs a row of the batch.

    Args:
        engine: the loaded programs.
        options: transcription options.
        sampler: given by the user; texts decoded together would share it in an unpredictable order.

    Returns:
        1 to the number of rows; 1: the texts are decoded singly.
    """
    if not uses_batch(engine, options) or sampler is not None:
        return 1
    return max(1, engine.batch_size // (options.decode.beam_size or 1))


def uses_batch(engine: Engine, options: TranscribeOptions) -> bool:
    """Return whether the bundle can decode several texts together, and the user allows it."""
    return engine.batch_size > 1 and options.batch


def decoder_of(engine: Engine, options: TranscribeOptions) -> Decoder:
    """Return a decoder for one text, whose beams or samples are decoded together if that is possible."""
    candidates = max(options.decode.beam_size or 1, options.decode.best_of or 1)
    decoder = None
    if candidates > 1 and uses_batch(engine, options):
        decoder = Batch(engine).decoder()
    return decoder or Decoder(engine)
