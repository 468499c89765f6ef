"""Train BabyBERTa, a small RoBERTa, on child-directed speech (AO-CHILDES), with SSA or softmax attention.

    accelerate launch -m ssa_hf.recipes.train_babyberta --config babyberta_ssa_2 --corpus aochildes.txt

The corpus is a text with one sentence a line, gone through in its order (by the age of the child) once for each of
``--patterns`` mask patterns. Writes the model and its tokenizer, checkpoints, TensorBoard logs, training.png and
summary.json into --output_dir. A killed run goes on with --resume_from_checkpoint last.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    RobertaConfig,
    set_seed,
)

import ssa_hf
from ssa_hf.recipes.arguments import parse
from ssa_hf.recipes.sentences import SentenceMasking, Sentences, read_lines
from ssa_hf.recipes.tokenizer import MASKED_LM_TOKENS, train_masked_lm_tokenizer
from ssa_hf.recipes.training import RecipeArguments, RecipeTrainer


@dataclass
class BabyBertaArguments:
    """The encoder and its corpus; the defaults are BabyBERTa's."""

    corpus: str = field(metadata={"help": "text file, one sentence a line"})
    attention: str = field(
        default="ssa", metadata={"help": "attention implementation: ssa, sdpa for softmax, or any other scoring"}
    )
    ssa: str | None = field(
        default=None, metadata={"help": f"SSA preset: {', '.join(ssa_hf.PRESETS)}; or trained b, n"}
    )
    layers: int = field(default=8, metadata={"help": "encoder layers"})
    hidden_size: int = field(default=256, metadata={"help": "width"})
    heads: int = field(default=8, metadata={"help": "attention heads"})
    ffn_size: int = field(default=1024, metadata={"help": "width of the feed-forward layers"})
    tokenizer: str | None = field(
        default=None,
        metadata={
            "help": "BabyBERTa's tokenizer.json, a folder or a Hub name; by default one is trained on the corpus"
        },
    )
    vocab_size: int = field(default=8192, metadata={"help": "entries of a trained tokenizer"})
    max_length: int = field(default=128, metadata={"help": "tokens an input"})
    long_sentences: str = field(
        default="drop", metadata={"help": "what to do with longer sentences", "choices": ["drop", "truncate"]}
    )
    patterns: int = field(default=10, metadata={"help": "mask patterns a sentence: passes through the corpus an epoch"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe; return the exit status."""
    options, training_arguments = parse((BabyBertaArguments, RecipeArguments), arguments, __doc__)
    try:
        tokenizer = load_tokenizer(options)
        sentences = Sentences(
            Path(options.corpus), tokenizer, options.max_length, options.long_sentences, options.patterns
        )
        if training_arguments.process_index == 0:
            print(f"{options.corpus}: {sentences.counts} for {options.max_length} tokens ({options.long_sentences})")
        training_arguments.remove_unused_columns = False  # the collator needs each sample's index
        set_seed(training_arguments.seed)
        trainer = RecipeTrainer(
            build_model(options, tokenizer),
            training_arguments,
            train_dataset=sentences,
            processing_class=tokenizer,
            data_collator=SentenceMasking(tokenizer, seed=training_arguments.seed),
        )
        settings = {**vars(options), **vars(sentences.counts)}
        checkpoint = trainer.checkpoint_to_resume(settings)
    except ValueError as error:
        print(f"train_babyberta: {error}", file=sys.stderr)
        return 2
    trainer.run(settings, checkpoint)
    return 0


def load_tokenizer(options: BabyBertaArguments) -> PreTrainedTokenizerBase:
    """Load a tokenizer, or train one on the corpus.

    Raises:
        ValueError: if it can't be loaded, or has no mask token.
    """
    if options.tokenizer is None:
        return train_masked_lm_tokenizer(read_lines(Path(options.corpus)), options.vocab_size)
    tokenizer: PreTrainedTokenizerBase
    try:
        if options.tokenizer.endswith(".json"):
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=options.tokenizer, **MASKED_LM_TOKENS)
            if len(tokenizer) != tokenizer.vocab_size:
                raise ValueError(f"it lacks some of the special tokens {', '.join(set(MASKED_LM_TOKENS.values()))}")
        else:
            tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ValueError(f"cannot load the tokenizer {options.tokenizer}: {str(error).splitlines()[0]}") from error
    if tokenizer.mask_token_id is None:
        raise ValueError(f"the tokenizer {options.tokenizer} has no mask token.")
    return tokenizer


def build_model(options: BabyBertaArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Build the encoder with random weights; the same seed gives SSA and softmax the same ones.

    Raises:
        ValueError: if the sizes do not fit together, or for an unknown SSA preset.
    """
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        intermediate_size=options.ffn_size,
        max_position_embeddings=options.max_length + tokenizer.pad_token_id + 1,  # RoBERTa counts from there
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    if options.attention == "ssa":
        config.ssa = ssa_hf.SSAConfig.from_any(options.ssa).to_dict()
    return AutoModelForMaskedLM.from_config(config, attn_implementation=options.attention)


if __name__ == "__main__":
    raise SystemExit(main())
