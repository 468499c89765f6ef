"""Pretrain a Nemotron-style decoder, with SSA or softmax attention, on FineWeb or on text of your own.

    accelerate launch -m ssa_hf.recipes.pretrain_fineweb --config nemotron_114m_ssa --output_dir runs/114m_ssa

Writes the model and its tokenizer, checkpoints, TensorBoard logs, training.png (loss, b and n) and summary.json into
--output_dir. A killed run goes on with --resume_from_checkpoint last, and sees every sample exactly once.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    NemotronConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    default_data_collator,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerCallback

import ssa_hf
from ssa_hf.recipes.arguments import parse
from ssa_hf.recipes.corpus import CorpusArguments, Counts, open_corpus, texts
from ssa_hf.recipes.packing import Block, PackedBlocks, PackedStream, cache_key, pack
from ssa_hf.recipes.tokenizer import train_tokenizer
from ssa_hf.recipes.training import RecipeArguments, RecipeTrainer


@dataclass
class ModelArguments:
    """The decoder: Nemotron's squared ReLU, LayerNorm1p and partial rotary embedding, of the paper's 114M size."""

    attention: str = field(
        default="ssa", metadata={"help": "attention implementation: ssa, sdpa for softmax, or any other scoring"}
    )
    ssa: str | None = field(default="nemotron", metadata={"help": f"SSA preset: {', '.join(ssa_hf.PRESETS)}"})
    ssa_per_head: bool | None = field(default=None, metadata={"help": "one (b, n) per head; by default as the preset"})
    layers: int = field(default=12, metadata={"help": "decoder layers"})
    hidden_size: int = field(default=768, metadata={"help": "width"})
    heads: int = field(default=24, metadata={"help": "query heads"})
    kv_heads: int = field(default=8, metadata={"help": "key and value heads"})
    ffn_size: int = field(default=3072, metadata={"help": "width of the feed-forward layers"})


@dataclass
class DataArguments(CorpusArguments):
    """The corpus, its tokenizer, and how it is cut into sequences."""

    sequence_length: int = field(default=1024, metadata={"help": "tokens a sequence"})
    separate_documents: bool = field(
        default=False, metadata={"help": "no attention across documents that share a sequence"}
    )
    streaming: bool = field(
        default=False, metadata={"help": "tokenise while training, in the order of the corpus, instead of into a cache"}
    )
    held_out_documents: int = field(
        default=500, metadata={"help": "first documents of the corpus, kept from training and evaluated on"}
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "tokenizer (folder or Hub name); by default one is trained from the corpus"}
    )
    vocab_size: int = field(default=50_000, metadata={"help": "entries of a trained tokenizer"})
    tokenizer_documents: int = field(default=100_000, metadata={"help": "documents a tokenizer is trained from"})
    cache_dir: str = field(default="~/.cache/ssa_hf", metadata={"help": "where tokenised corpora are kept"})
    prepare_only: bool = field(default=False, metadata={"help": "fill the cache and stop, before a large launch"})


class StreamPosition(TrainerCallback, ExportableState):
    """Puts the position of a stream into each checkpoint's trainer_state.json."""

    def __init__(self, stream: PackedStream, samples_per_step: int, step: int) -> None:
        self.stream, self.samples_per_step, self.step = stream, samples_per_step, step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Follow the optimiser steps, as :meth:`state` is not told them."""
        self.step = state.global_step

    def state(self) -> dict[str, Any]:
        """Return what is written into the checkpoint."""
        return {"args": {}, "attributes": {"position": self.stream.position(self.step * self.samples_per_step)}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe; return the exit status."""
    model_arguments, data_arguments, training_arguments = parse(
        (ModelArguments, DataArguments, RecipeArguments), arguments, __doc__
    )
    try:
        tokenizer, train, held_out = prepare(data_arguments, training_arguments)
        if data_arguments.prepare_only:
            return 0
        set_seed(training_arguments.seed)
        model = build_model(model_arguments, data_arguments, tokenizer)
        trainer = RecipeTrainer(
            model,
            training_arguments,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            data_collator=default_data_collator,
        )
        options = {**vars(model_arguments), **vars(data_arguments)}
        settings = {name: value for name, value in options.items() if name not in ("cache_dir", "prepare_only")}
        checkpoint = trainer.checkpoint_to_resume(settings)
    except ValueError as error:
        print(f"pretrain_fineweb: {error}", file=sys.stderr)
        return 2
    if isinstance(train, PackedStream):
        follow_stream(trainer, train, checkpoint)
    trainer.run(settings, checkpoint)
    return 0


def prepare(
    data: DataArguments, arguments: RecipeArguments
) -> tuple[PreTrainedTokenizerBase, Dataset[Block], Dataset[Block]]:
    """Return the tokenizer and the blocks to train and to evaluate on; the first process fills the cache.

    Raises:
        ValueError: if the corpus or the tokenizer can't be read, or there is too little of either.
    """
    if data.held_out_documents < 1:
        raise ValueError("--held_out_documents must be at least 1: the run is evaluated on them.")
    local = Path(data.dataset).exists()
    cache = Path(data.cache_dir).expanduser()
    with arguments.main_process_first(local=False, desc="tokenising"):
        rows = open_corpus(data, streaming=data.streaming or local)
        train_rows, held_out_rows = rows.skip(data.held_out_documents), rows.take(data.held_out_documents)
        tokenizer = load_tokenizer(data, train_rows, cache)
        key = cache_key(identity(data), tokenizer.backend_tokenizer.to_str())
        held_out = pack(held_out_rows, data, tokenizer, cache / f"held-out-{key}", "held-out text")
        if not data.streaming:
            folder = pack(train_rows, data, tokenizer, cache / f"train-{key}", "training text")
    shape = (data.sequence_length, data.separate_documents)
    train = PackedStream(train_rows, data, tokenizer, *shape) if data.streaming else PackedBlocks(folder, *shape)
    report(arguments, "training", train)
    evaluated = PackedBlocks(held_out, *shape)
    report(arguments, "held out", evaluated)
    return tokenizer, train, evaluated


def load_tokenizer(
    data: DataArguments, rows: datasets.Dataset | datasets.IterableDataset, cache: Path
) -> PreTrainedTokenizerBase:
    """Load the tokenizer that is asked for, or train one, once, from the first documents.

    Raises:
        ValueError: if there is no such tokenizer.
    """
    if data.tokenizer is not None:
        try:
            return AutoTokenizer.from_pretrained(data.tokenizer)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot load the tokenizer {data.tokenizer}: {str(error).splitlines()[0]}") from error
    folder = cache / f"tokenizer-{cache_key(identity(data), data.vocab_size, data.tokenizer_documents)}"
    if not (folder / "tokenizer_config.json").exists():
        documents = texts(rows.take(data.tokenizer_documents), data, Counts())
        train_tokenizer(documents, data.vocab_size, show_progress=True).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def build_model(model: ModelArguments, data: DataArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Build the decoder with random weights; the same seed gives SSA and softmax the same ones.

    Raises:
        ValueError: if the sizes do not fit together, or for unknown SSA options.
    """
    if model.hidden_size % model.heads or model.heads % model.kv_heads:
        raise ValueError(
            f"{model.heads} heads must divide the width {model.hidden_size}, and {model.kv_heads} key heads the heads."
        )
    config = NemotronConfig(
        vocab_size=len(tokenizer),
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.hidden_size // model.heads,
        max_position_embeddings=data.sequence_length,
        tie_word_embeddings=True,
        use_cache=False,  # with a cache, Transformers would not see that documents are separate
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    if model.attention == "ssa":
        options = ssa_hf.SSAConfig.from_any(model.ssa)
        per_head = options.per_head if model.ssa_per_head is None else model.ssa_per_head
        config.ssa = dataclasses.replace(options, per_head=per_head).to_dict()
    decoder = AutoModelForCausalLM.from_config(config, attn_implementation=model.attention)
    decoder.generation_config.use_cache = True
    return decoder


def follow_stream(trainer: RecipeTrainer, stream: PackedStream, checkpoint: Path | None) -> None:
    """Save the stream's position in checkpoints, and put it where a checkpoint left it."""
    # Otherwise Trainer would tokenise again all that was seen, to skip it.
    trainer.args.ignore_data_skip = True
    step = 0
    if checkpoint is not None:
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
        step = state["global_step"]
        stream.restore(state["stateful_callbacks"][StreamPosition.__name__]["attributes"]["position"])
    trainer.add_callback(StreamPosition(stream, trainer.args.samples_per_step, step))


def identity(data: DataArguments) -> list[Any]:
    """Return what tells two corpora apart: their names, and the sizes and dates of local files."""
    path = Path(data.dataset)
    files = sorted(path.rglob("*")) if path.is_dir() else [path] if path.exists() else []
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return [data.dataset, data.dataset_config, data.split, data.text_column, data.held_out_documents, stats]


def report(arguments: RecipeArguments, name: str, blocks: Dataset[Block]) -> None:
    """Print how much text there is, from the first process."""
    if arguments.process_index == 0 and isinstance(blocks, PackedBlocks):
        counts = Counts(*(blocks.counts[key] for key in ("documents", "null", "blank")))
        print(f"{name}: {blocks.counts['tokens']:,} tokens in {len(blocks):,} sequences; {counts}")


if __name__ == "__main__":
    raise SystemExit(main())
