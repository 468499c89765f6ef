"""What the training recipes share on top of Trainer: arguments, resuming, and a log that knows what scorings train."""

import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ssa_hf.parameters import ScoringParameters
from ssa_hf.recipes.training_log import plot_training, write_summary

logger = logging.getLogger(__name__)

#: Dense bfloat16 peak of some devices in TFLOP/s, by a part of their name (the makers' data sheets).
PEAK_TFLOPS = {"A100": 312.0, "H100": 989.0, "H200": 989.0, "B200": 2250.0, "MI300X": 1307.0}


@dataclass
class RecipeArguments(TrainingArguments):
    """Trainer's arguments, and a global batch size that holds for any number of processes."""

    report_to: str | None = field(default="tensorboard", metadata={"help": "tensorboard, wandb, none"})
    dataloader_drop_last: bool = field(
        default=True, metadata={"help": "leave out the last, incomplete batch; otherwise some samples are seen twice"}
    )
    global_batch_size: int | None = field(
        default=None,
        metadata={"help": "samples an optimiser step over all processes; gradient accumulation follows from it"},
    )
    peak_tflops: float | None = field(
        default=None,
        metadata={
            "help": "peak of one device, for model FLOPs utilisation (known for: " + ", ".join(PEAK_TFLOPS) + ")"
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.include_num_input_tokens_seen = "all"
        if self.global_batch_size is not None:
            at_once = self.train_batch_size * self.world_size
            if self.global_batch_size % at_once:
                raise ValueError(
                    f"global_batch_size {self.global_batch_size} is no multiple of the {at_once} samples that "
                    f"{self.world_size} process(es) take at once: change per_device_train_batch_size "
                    f"{self.per_device_train_batch_size}, or the number of processes."
                )
            self.gradient_accumulation_steps = self.global_batch_size // at_once
        if self.peak_tflops is None and torch.cuda.is_available():
            name = torch.cuda.get_device_name()
            self.peak_tflops = next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)

    @property
    def samples_per_step(self) -> int:
        """Samples an optimiser step takes over all processes."""
        return self.train_batch_size * self.gradient_accumulation_steps * self.world_size


class RecipeTrainer(Trainer):
    """A Trainer that logs throughput and what the scoring trains, and can go on from the last whole checkpoint."""

    args: RecipeArguments
    _last_log: tuple[float, int, float] | None = None

    def checkpoint_to_resume(self, settings: dict[str, Any]) -> Path | None:
        """Return the checkpoint to go on from: none, the last of ``output_dir``, or the one that was asked for.

        Args:
            settings: the recipe's options that a resumed run must share; :meth:`run` keeps them in run.json.

        Raises:
            ValueError: if ``output_dir`` holds checkpoints and ``resume_from_checkpoint`` is not given, or they come
                from a run with other settings.
        """
        output, asked = Path(str(self.args.output_dir)), self.args.resume_from_checkpoint
        checkpoint = last_checkpoint(output) if asked in (None, "last") else Path(asked)
        if checkpoint is None:
            return None
        if asked is None:
            raise ValueError(
                f"{output} holds checkpoints: --resume_from_checkpoint last goes on from {checkpoint.name}; for a new "
                "run choose another --output_dir."
            )
        before = json.loads((checkpoint.parent / "run.json").read_text())
        now = self._run_settings(settings)
        if changed := sorted(key for key in before | now if before.get(key) != now.get(key)):
            raise ValueError(
                f"{checkpoint} comes from a run with other settings ({', '.join(changed)}): give those of run.json "
                "beside it, or choose another --output_dir."
            )
        return checkpoint

    def run(self, settings: dict[str, Any], checkpoint: Path | None) -> None:
        """Train, evaluate, and save model, plot and summary in ``output_dir``.

        Args:
            settings: the recipe's options.
            checkpoint: from :meth:`checkpoint_to_resume`.
        """
        output = Path(str(self.args.output_dir))
        settings = self._run_settings(settings)
        if self.is_world_process_zero():
            output.mkdir(parents=True, exist_ok=True)
            (output / "run.json").write_text(json.dumps(settings, indent=2) + "\n")
        self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        self.save_model()
        if self.eval_dataset is not None and not self._evaluated_last_step():
            self.evaluate()
        if self.is_world_process_zero():
            write_summary(self.state.log_history, settings, output / "summary.json")
            plot_training(self.state.log_history, output / "training.png")

    def _evaluated_last_step(self) -> bool:
        return any(
            "eval_loss" in record and record["step"] == self.state.global_step for record in self.state.log_history
        )

    def _run_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {**settings, "seed": self.args.seed, "global_batch_size": self.args.samples_per_step}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add tokens/s, model TFLOP/s, model FLOPs utilisation and scoring values to each record of a training loss."""
        if "loss" in logs:
            logs.update(self._throughput())
            logs.update(scoring_values(self.accelerator.unwrap_model(self.model)))
        # Without start_time, as Trainer would add speeds since the start under the names of the final summary.
        super().log(logs)

    def _throughput(self) -> dict[str, float]:
        now = (time.perf_counter(), self.state.num_input_tokens_seen, self.state.total_flos)
        before, self._last_log = self._last_log, now
        if before is None:
            return {}
        seconds, tokens, flops = (after - earlier for after, earlier in zip(now, before, strict=True))
        speeds = {"tokens_per_second": tokens / seconds, "model_tflops": flops / seconds / 1e12}
        if self.args.peak_tflops:
            speeds["mfu"] = speeds["model_tflops"] / self.args.world_size / self.args.peak_tflops
        return speeds

    def floating_point_ops(self, inputs: dict[str, Tensor | Any]) -> int:
        """Count 6 FLOPs a parameter and token, and 12 a layer, channel and position for attention (PaLM, appendix B).

        Embeddings count if they are tied, as they are then the output layer too.
        """
        model: PreTrainedModel = self.accelerator.unwrap_model(self.model)
        config = model.config
        tokens = inputs[model.main_input_name]
        width = config.num_attention_heads * getattr(
            config, "head_dim", config.hidden_size // config.num_attention_heads
        )
        attention = 12 * config.num_hidden_layers * width * tokens.shape[-1]
        parameters = model.num_parameters(exclude_embeddings=not config.tie_word_embeddings)
        return tokens.numel() * (6 * parameters + attention)


def last_checkpoint(output: Path) -> Path | None:
    """Return the latest checkpoint that was written to its end: a killed run may leave half of one."""
    found = sorted(output.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=lambda path: int(path.name.split("-")[-1]))
    for checkpoint in reversed(found):
        try:
            # Trainer writes it last.
            json.loads((checkpoint / "trainer_state.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            logger.warning("%s is incomplete, the checkpoint before it is taken.", checkpoint)
        else:
            return checkpoint
    return None


def scoring_values(model: torch.nn.Module) -> dict[str, float]:
    """Return what the scoring trains, such as b and n, of every layer and head (of every layer, if heads share them).

    Keys are named for TensorBoard: "ssa/n/layer0/head1".
    """
    values = {}
    modules = [module for module in model.modules() if isinstance(module, ScoringParameters)]
    for layer, module in enumerate(modules):
        for name, heads in module.values().items():
            gathered = heads.detach()
            if hasattr(gathered, "full_tensor"):  # sharded by FSDP2
                gathered = gathered.full_tensor()
            prefix = f"{module.config.name}/{name}/layer{layer}"
            if gathered.numel() == 1:
                values[prefix] = gathered.item()
                continue
            for head, value in enumerate(gathered.tolist()):
                values[f"{prefix}/head{head}"] = value
    return values
