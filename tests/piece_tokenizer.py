"""Tokenizers of bytes, and of 64 pieces as sentencepiece makes them: a word's space is part of it."""

from string import ascii_lowercase

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPACE = "\u2581"
BYTES = "é€🙂".encode()


def make_piece_tokenizer(*, metaspace: bool, fallback: bytes = BYTES) -> PreTrainedTokenizerFast:
    """With Llama 2's normalizer and decoder, or with the metaspace pair of later conversions."""
    letters = [f"{SPACE}{letter}" for letter in ascii_lowercase]
    by_byte = [f"<0x{byte:02X}>" for byte in sorted(set(fallback))]
    pieces = ["<pad>", "<eos>", SPACE, *ascii_lowercase, *letters, ".", *by_byte]
    merges = [(SPACE, letter) for letter in ascii_lowercase]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<pad>", byte_fallback=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        steps = [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token for each byte, and </s>."""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", clean_up_tokenization_spaces=False)
