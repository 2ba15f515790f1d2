"""How many texts are decoded together, and the decoders of single texts."""

from collections.abc import Iterator
from contextlib import contextmanager

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


class IdleDecoders:
    """Lends decoders of one text, and keeps those that no call uses.

    In short windows, a decoder computes keys and values for the audio only, once its arrays hold those of
    silence. So a call continues with the decoder of an earlier one. Without short windows none is kept.

    Args:
        engine: the loaded programs.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._idle: list[Decoder] = []

    @contextmanager
    def lend(self, options: TranscribeOptions | None = None) -> Iterator[Decoder]:
        """Lend a row of a new batch if beams or samples are decoded together; else an idle or new decoder.

        Args:
            options: transcription options; None: beams and samples are decoded one after the other.
        """
        if options and (row := self._row(options)):
            yield row
            return
        try:
            decoder = self._idle.pop()
        except IndexError:
            decoder = Decoder(self._engine)
        yield decoder
        if self._engine.short_windows is not None:
            self._idle.append(decoder)

    def _row(self, options: TranscribeOptions) -> Decoder | None:
        candidates = max(options.decode.beam_size or 1, options.decode.best_of or 1)
        if candidates > 1 and uses_batch(self._engine, options):
            return Batch(self._engine).decoder()
        return None
