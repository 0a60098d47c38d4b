"""Where random words come from: the operating system for releases, a keyed stream for experiments."""

from __future__ import annotations

import hashlib
import ssl
from typing import NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from asfl_privacy.accounting.checks import check_integer

CHUNK_BYTES = 1 << 16
WORD_BITS = 64

Words = npt.NDArray[np.uint64]


class WordSource(Protocol):
    """Anything that gives uniform, independent 64-bit words."""

    @property
    def is_reproducible(self) -> bool:
        """Whether whoever knows the key can repeat the words: then there is no privacy towards them."""

    def words(self, count: int, /) -> Words:
        """Draw ``count`` words, each used once."""


class SystemSource:
    """Words of the operating system's cryptographic generator (OpenSSL's, seeded by the kernel).

    Guarantee:
        No state is kept here, so a fork, a deep copy and a pickle draw other words than the original, and
        ``torch.manual_seed`` changes nothing. OpenSSL reseeds itself in a forked child.

    Source:
        ``ssl.RAND_bytes``; OpenSSL 1.1.1 and later, RAND(7): AES-256 in counter mode.

    Example:
        >>> SystemSource().words(3).shape
        (3,)
    """

    is_reproducible = False

    def words(self, count: int, /) -> Words:
        """Draw ``count`` fresh words.

        Args:
            count: ≥ 0.

        Returns:
            uint64, shape (count,); may be read-only.

        Raises:
            ValueError: for a negative count.
        """
        num_bytes = 8 * check_integer("count", count, minimum=0)
        if num_bytes <= CHUNK_BYTES:
            return np.frombuffer(ssl.RAND_bytes(num_bytes), dtype=np.uint64)
        drawn = np.empty(count, dtype=np.uint64)
        for start in range(0, count, CHUNK_BYTES // 8):
            part = drawn[start : start + CHUNK_BYTES // 8]
            part[:] = np.frombuffer(ssl.RAND_bytes(part.nbytes), dtype=np.uint64)
        return drawn


class SeededSource:
    """Words that a key determines: for experiments that must repeat, never for a release that must be private.

    Args:
        key: any bytes; the stream is Philox-4x64 under the BLAKE2b digest of it.

    Raises:
        ValueError: where the key is not bytes.

    Guarantee:
        Different keys start Philox with different keys and counters but for collisions of a 256-bit digest. Whoever
        knows or guesses the key can subtract the noise. Copies and pickles are refused, since both would draw the same
        words; a forked child would too, so give each worker its own key.

    Example:
        >>> bool((SeededSource(b"seed 0").words(4) == SeededSource(b"seed 0").words(4)).all())
        True
    """

    is_reproducible = True

    def __init__(self, key: bytes) -> None:
        if not isinstance(key, bytes):
            raise ValueError(f"key is a {type(key).__name__}: a seeded source takes bytes; pass e.g. b'seed 0 round 1'")
        digest = hashlib.blake2b(key, digest_size=32, person=b"asfl lattice").digest()
        # the low half of the 256-bit counter stays free: no stream reaches the start of another
        start = int.from_bytes(digest[16:], "big") << 128
        self._stream = np.random.Philox(key=int.from_bytes(digest[:16], "big"), counter=start)

    def words(self, count: int, /) -> Words:
        """The next ``count`` words of the stream; see ``SystemSource.words``."""
        return self._stream.random_raw(check_integer("count", count, minimum=0))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a SeededSource was to be copied or pickled: both copies would draw the same noise; make a new one"
        )


def draw_integer(source: WordSource, *, num_words: int) -> int:
    """A uniform integer in [0, 2^(64·num_words)).

    Example:
        >>> 0 <= draw_integer(SystemSource(), num_words=2) < 2**128
        True
    """
    return int.from_bytes(source.words(num_words).astype("<u8").tobytes(), "little")
