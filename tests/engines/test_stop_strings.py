"""Stop strings are found in a decoded tail exactly where decoding the whole finds them."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from whet.data.tokenizer import byte_tokenizer
from whet.rollout.base import Sampling
from whet.rollout.stopping import find_end, find_stop_string


def oracle(decode, tokens, stop, fresh):
    """Everything decoded for each look and each cut."""
    holds = lambda kept: any(s in decode(tokens[:kept]) for s in stop)
    if not holds(len(tokens)):
        return None
    return next((k for k in range(len(tokens) - fresh + 1, len(tokens)) if holds(k)), len(tokens))


def byte_level():
    """Every token a byte; those after 256 are special and show nothing."""
    tokenizer = byte_tokenizer()
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def metaspace():
    """Words and letters, and bytes for what has none, as SentencePiece has them; a newline is a byte."""
    pieces = [*WORDS, *(chr(b) if 33 <= b < 127 else f"<0x{b:02X}>" for b in range(256))]
    inner = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return lambda ids: inner.decode(list(ids))


WORDS = ["▁the", "▁a", "nd", "é", "▁", "STOP", "▁S", "OP", "▁on"]
TEXTS = ["plain words that go on and on, ", "é ü ", "日本語の文", "👩‍👩‍👧 ", "\n\n  ", "STO", "ST"]


def spoken(rng, kind):
    """Ids of random text with multi-byte characters, special tokens, and some broken bytes in it."""
    text = "".join(rng.choice(TEXTS) for _ in range(30))
    shift = 0 if kind is byte_level else len(WORDS)
    ids = [WORDS.index("▁") if shift and b == 32 else b + shift for b in text.encode()]
    for _ in range(4):
        ids.insert(int(rng.integers(len(ids))), int(rng.integers(259 if kind is byte_level else len(WORDS))))
    ids.insert(int(rng.integers(len(ids))), 0xE9 + shift)
    return ids


@pytest.mark.parametrize("kind", [byte_level, metaspace])
@pytest.mark.parametrize("seed", range(6))
def test_the_cut_from_a_tail_is_the_cut_from_the_whole(kind, seed):
    decode, rng = kind(), np.random.default_rng(seed)
    ids, stop = spoken(rng, kind), [str(rng.choice(["STOP", "語の", "👧 S", "\n\n  é", "on, 日"])), "é ü é ü é ü é"]
    made = 0
    while made < len(ids):
        fresh = min(int(rng.integers(1, 9)), len(ids) - made)
        made += fresh
        expected = oracle(decode, ids[:made], stop, fresh)
        assert find_stop_string(decode, ids[:made], stop, new=fresh) == expected
        if expected is not None:
            break


@pytest.mark.parametrize("kind", [byte_level, metaspace])
def test_a_string_that_begins_far_before_the_new_tokens_is_found_at_its_last(kind):
    decode, shift = kind(), 0 if kind is byte_level else len(WORDS)
    ids = [WORDS.index("▁") if shift and b == 32 else b + shift for b in ("x" * 300 + "日本語 stop 👧").encode()]
    for kept in range(290, len(ids)):
        assert find_stop_string(decode, ids[:kept], ["日本語 stop 👧"], new=1) is None
    assert find_stop_string(decode, ids, ["日本語 stop 👧"], new=1) == len(ids)
    assert find_stop_string(decode, ids, ["x日本"], new=19) == 306


def test_a_look_costs_the_same_at_any_length():
    decoded = []
    bytes_of = byte_level()

    def decode(ids):
        decoded.append(len(ids))
        return bytes_of(ids)

    for count in (100, 1000, 10_000):
        decoded.clear()
        assert find_stop_string(decode, np.full(count, 97), ["</answer>"], new=4) is None
        assert sum(decoded) < 100


@pytest.mark.parametrize(
    ("said", "most", "end"),
    [
        ("a#bb", 9, (2, "stop")),  # the id comes first
        ("bba#", 9, (2, "stop")),  # the string does
        ("ab", 9, None),
        ("aaa#", 3, (3, "length")),  # behind the last token that may be drawn
        ("aabb", 3, (3, "length")),
        ("aa#", 3, (3, "stop")),
    ],
)
def test_a_completion_ends_at_the_first_of_an_id_a_string_and_its_length(said, most, end):
    sampling = Sampling(max_tokens=most, stop_ids=(ord("#"),), stop=("bb",))
    ids, decode = [ord(letter) for letter in said], lambda ids: "".join(map(chr, ids))
    assert find_end(sampling, ids, new=len(ids), decode=decode) == end
