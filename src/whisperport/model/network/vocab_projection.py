"""The vocabulary projection as a separate program, which can have another placement than the decoder."""

from torch import Tensor, nn

from whisperport.model.network.decoder import Decoder


class VocabProjection(nn.Module):
    """The `vocab_projection` program, with the embedding of a `Decoder` as its weight.

    Args:
        decoder: the decoder whose token embedding is used.
        pieces: number of outputs, for targets on which one matmul as wide as the vocabulary is too large.
    """

    def __init__(self, decoder: Decoder, pieces: int = 1) -> None:
        super().__init__()
        self.heads = nn.ModuleList(vocabulary_pieces(decoder.token_embedding.weight, pieces))

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Multiply a hidden state (1, 1, d) by the embedding: logits (1, 1, V / pieces) of each piece."""
        return tuple(head(hidden) for head in self.heads)


def vocabulary_pieces(table: Tensor, count: int) -> list[nn.Linear]:
    """Split the vocabulary into consecutive parts, and return a linear layer for each.

    The sizes of the parts differ by at most 1. 51865 tokens in four parts are 12966, 12966, 12966 and
    12967, as in the published graphs.

    Args:
        table: the token embedding (V, d).
        count: number of parts.
    """
    n_vocab, width = table.shape
    pieces = []
    for i in range(count):
        part = table[n_vocab * i // count : n_vocab * (i + 1) // count]
        piece = nn.Linear(width, len(part), bias=False, device="meta")
        piece.weight = nn.Parameter(part, requires_grad=False)
        pieces.append(piece)
    return pieces
