"""OpenAI's `.pt` files: digests, sizes and alignment heads.

The digests and heads are those of openai-whisper (`whisper/__init__.py`, `_MODELS` and
`_ALIGNMENT_HEADS`, MIT licence). A mask is a boolean array (layers, heads), compressed with gzip and
encoded in base 85.
"""

import base64
import gzip
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Release:
    """One `.pt` file that OpenAI published.

    Attributes:
        name: name of the file without `.pt`.
        sha256: its digest in hexadecimal.
        most_bytes: the file is not larger than this: 2.4 bytes per parameter. The files hold float16, and
            the numbers of parameters are those of openai-whisper's README.
        heads: mask of the alignment heads.
    """

    name: str
    sha256: str
    most_bytes: int
    heads: str


RELEASES = {
    name: Release(name, sha256, millions * 2_400_000, heads)
    for name, sha256, millions, heads in (
        (
            "tiny.en",
            "d3dd57d32accea0b295c96e26691aa14d8822fac7d9d27d5dc00b4ca2826dd03",
            39,
            "ABzY8J1N>@0{>%R00Bk>$p{7v037`oCl~+#00",
        ),
        (
            "tiny",
            "65147644a518d12f04e32d6f3b26facc3f8dd46e5390956a9424a650c0ce22b9",
            39,
            "ABzY8bu8Lr0{>%RKn9Fp%m@SkK7Kt=7ytkO",
        ),
        (
            "base.en",
            "25a8566e1d0c1e2231d1c762132cd20e0f96a85d16145c3a00adf5d1ac670ead",
            74,
            "ABzY8;40c<0{>%RzzG;p*o+Vo09|#PsxSZm00",
        ),
        (
            "base",
            "ed3a0b6b1c0edf879ad9b11b1af5a0e6ab5db9205f891f668f8b0e6c6326e34e",
            74,
            "ABzY8KQ!870{>%RzyTQH3`Q^yNP!>##QT-<FaQ7m",
        ),
        (
            "small.en",
            "f953ad0fd29cacd07d5a9eda5624af0f6bcf2258be67c92b79389873d91e0872",
            244,
            "ABzY8>?_)10{>%RpeA61k&I|OI3I$65C{;;pbCHh0B{qLQ;+}v00",
        ),
        (
            "small",
            "9ecf779972d90ba49c06d968637d720dd632c55bbf19d441fb42bf17a411e794",
            244,
            "ABzY8DmU6=0{>%Rpa?J`kvJ6qF(V^F86#Xh7JUGMK}P<N0000",
        ),
        (
            "medium.en",
            "d7440d1dc186f76616474e0ff0b3b6b879abc9d1a4926b7adfa41db2d497ab4f",
            769,
            "ABzY8usPae0{>%R7<zz_OvQ{)4kMa0BMw6u5rT}kRKX;$NfYBv00*Hl@qhsU00",
        ),
        (
            "medium",
            "345ae4da62f9b3d59415adc60127b97c714f32e89e936602e85993674d08dcb1",
            769,
            "ABzY8B0Jh+0{>%R7}kK1fFL7w6%<-Pf*t^=N)Qr&0RR9",
        ),
        (
            "large-v1",
            "e4b87e7e0bf463eb8e6956e646f1e277e901512310def2c24bf0e11bd3c28e9a",
            1550,
            "ABzY8r9j$a0{>%R7#4sLmoOs{s)o3~84-RPdcFk!JR<kSfC2yj",
        ),
        (
            "large-v2",
            "81f7c96c852ee8fc832187b0132e569d6c3065a3252ed18e56effd0b6a73e524",
            1550,
            "ABzY8zd+h!0{>%R7=D0pU<_bnWW*tkYAhobTNnu$jnkEkXqp)j;w1Tzk)UH3X%SZd&fFZ2fC2yj",
        ),
        (
            "large-v3",
            "e5b1a55b89c1367dacf97e3e19bfd829a01529dbfdeefa8caeb59b3f1b81dadb",
            1550,
            "ABzY8gWO1E0{>%R7(9S+Kn!D~%ngiGaR?*L!iJG9p-nab0JQ=-{D1-g00",
        ),
        (
            "large-v3-turbo",
            "aff26ae408abcba5fbf8813c21e62b0941638c5f6eebfb145be0c9839262a19a",
            809,
            "ABzY8j^C+e0{>%RARaKHP%t(lGR*)0g!tONPyhe`",
        ),
    )
}
ALIASES = {"large": "large-v3", "turbo": "large-v3-turbo"}  # openai-whisper's second names


# Decoder layers, heads per layer, size of the vocabulary -> name of the release.
# large-v1 has the sizes of large-v2.
_OF_SIZES = {
    (4, 6, 51864): "tiny.en",
    (4, 6, 51865): "tiny",
    (6, 8, 51864): "base.en",
    (6, 8, 51865): "base",
    (12, 12, 51864): "small.en",
    (12, 12, 51865): "small",
    (24, 16, 51864): "medium.en",
    (24, 16, 51865): "medium",
    (32, 20, 51865): "large-v2",
    (32, 20, 51866): "large-v3",
    (4, 20, 51866): "large-v3-turbo",
}


def alignment_heads_of_size(
    *, n_layers: int, n_heads: int, n_vocab: int
) -> tuple[tuple[tuple[int, int], ...], str]:
    """Return the alignment heads of the release with these sizes, and a phrase that names their origin.

    Fine-tuned models have the heads of the release that they began as. For other sizes see
    `alignment_heads`.

    Args:
        n_layers: number of decoder layers.
        n_heads: number of heads per decoder layer.
        n_vocab: size of the vocabulary.
    """
    name = _OF_SIZES.get((n_layers, n_heads, n_vocab), "")
    digest = RELEASES[name].sha256 if name else ""
    heads = alignment_heads(digest, n_layers=n_layers, n_heads=n_heads)
    return heads, f"OpenAI's `{name}`" if name else "the second half of the decoder"


def alignment_heads(sha256: str, *, n_layers: int, n_heads: int) -> tuple[tuple[int, int], ...]:
    """Return the alignment heads of a file, as (decoder layer, head) pairs.

    For files that OpenAI did not release, all heads of the second half of the decoder layers, as in
    openai-whisper.

    Args:
        sha256: digest of the file.
        n_layers: number of decoder layers.
        n_heads: number of heads per decoder layer.
    """
    release = next(
        (candidate for candidate in RELEASES.values() if candidate.sha256 == sha256), None
    )
    if release is not None:
        mask = np.frombuffer(gzip.decompress(base64.b85decode(release.heads)), dtype=bool)
        pairs = np.argwhere(mask.reshape(n_layers, n_heads))
        return tuple((int(layer), int(head)) for layer, head in pairs)
    upper_half = range(n_layers // 2, n_layers)
    return tuple((layer, head) for layer in upper_half for head in range(n_heads))
