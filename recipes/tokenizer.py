"""Byte-level BPE tokenizers, trained from the data."""

from collections.abc import Iterable

from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import RobertaProcessing
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
#: BabyBERTa's special tokens, in the order of its vocabulary.
MASKED_LM_TOKENS = {
    "mask_token": "<mask>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "cls_token": "<s>",
    "sep_token": "</s>",
}


def train_tokenizer(texts: Iterable[str], vocab_size: int, show_progress: bool = False) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at most ``vocab_size`` entries, one of which ends a document."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=show_progress)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def train_masked_lm_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer like BabyBERTa's: lower case, a space before the first word, ``<s>`` and ``</s>`` around it."""
    bpe = ByteLevelBPETokenizer(lowercase=True, add_prefix_space=True)
    special = list(dict.fromkeys(MASKED_LM_TOKENS.values()))
    bpe.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=special)
    end, begin = ("</s>", special.index("</s>")), ("<s>", special.index("<s>"))
    bpe._tokenizer.post_processor = RobertaProcessing(end, begin, True, True)  # the last: add_prefix_space
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **MASKED_LM_TOKENS)
