"""The growing text of a transcription as pieces that are only ever appended."""

from whisperport.speech.text import Segment
from whisperport.transcription import Transcript

UNFINISHED = "\ufffd"  # of a character whose last bytes the next window may bring


class Deltas:
    """Turns transcripts so far into deltas. Joined, they are the text of the last one."""

    def __init__(self) -> None:
        self._sent, self._n_segments = "", 0

    def of(self, transcript: Transcript, *, final: bool = False) -> tuple[str, tuple[Segment, ...]]:
        """Return the text and the segments since the last call.

        Args:
            transcript: the transcript so far.
            final: it is complete, so that nothing is held back.
        """
        text = transcript.text if final else transcript.text.rstrip(f"{UNFINISHED} \n\t")
        if not text.startswith(self._sent):
            assert not final, "the text of a transcript only grows"
            return "", ()
        delta, self._sent = text[len(self._sent) :], text
        new = transcript.segments[self._n_segments :]
        self._n_segments = len(transcript.segments)
        return delta, new
