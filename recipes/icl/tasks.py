"""The in-context tasks of the paper, generated on the fly: what is in a prompt, and what is asked about it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

Numbers = NDArray[np.float32]


@dataclass(frozen=True)
class Shift:
    """How prompts differ from those of training.

    Attributes:
        sigma: standard deviation of the numbers x.
        context_sigma: a further factor on all x but the last. A large number at the place of the answer itself weighs
            on it without any attention; this factor leaves only what attention makes of large numbers.
        function_sigma: standard deviation of a and c (linear functions only).
        large_value: one x, not the last, of an otherwise unchanged prompt takes this value; none by default. To
            quantifiers it never changes the answer, as it gets the sign that decides nothing; to linear functions it is
            one more example.
    """

    sigma: float = 1.0
    context_sigma: float = 1.0
    function_sigma: float = 1.0
    large_value: float | None = None


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        prompt: makes (numbers, answers) from a generator, a number of x and a shift.
        kinds: the numbers of a prompt are of this many kinds in turn: x and f(x) for functions. The x are asked about.
        problem_type: Transformers' name for the loss: binary cross-entropy or mean squared error.
    """

    prompt: Callable[[np.random.Generator, int, Shift], tuple[Numbers, Numbers]]
    kinds: int
    problem_type: str


class Prompts(Dataset[dict[str, Numbers]]):
    """Prompts of one task; sample ``index`` depends on ``seed`` and ``index`` alone, not on model, batch or process.

    Args:
        task: one of ``TASKS``.
        length: number of x of each prompt. Every one is asked about, so that all lengths up to it are trained.
        count: number of prompts.
        seed: integers; training and testing take different ones.
        shift: difference from the training distribution.
    """

    def __init__(self, task: str, length: int, count: int, seed: tuple[int, ...], shift: Shift | None = None) -> None:
        self.task, self.length, self.count, self.seed = TASKS[task], length, count, seed
        self.shift = shift or Shift()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Numbers]:
        generator = np.random.default_rng((*self.seed, index))
        values, labels = self.task.prompt(generator, self.length, self.shift)
        return {"values": values, "labels": labels}


def every(generator: np.random.Generator, length: int, shift: Shift) -> tuple[Numbers, Numbers]:
    """Return numbers, and for each prefix whether every number in it is positive (1) or not (0)."""
    values, decided = _quantified(generator, length, shift, deciding_sign=-1)
    return values, 1 - decided


def some(generator: np.random.Generator, length: int, shift: Shift) -> tuple[Numbers, Numbers]:
    """Return numbers, and for each prefix whether some number in it is positive (1) or not (0)."""
    return _quantified(generator, length, shift, deciding_sign=1)


def _quantified(
    generator: np.random.Generator, length: int, shift: Shift, deciding_sign: int
) -> tuple[Numbers, Numbers]:
    """Draw numbers of which none decides the answer in half of the prompts; return whether each prefix is decided.

    Drawn freely from N(0, 1), a number decides the answer nearly always within the first few, and long prompts have
    only one answer. Here the first deciding number stands anywhere with equal chance, in the other half of the
    prompts; before it numbers are of the other sign, after it free.
    """
    values = generator.standard_normal(length)
    first = length if generator.random() < 0.5 else int(generator.integers(length))
    values[:first] = -deciding_sign * np.abs(values[:first])
    values[first : first + 1] = deciding_sign * np.abs(values[first : first + 1])
    values *= shift.sigma
    values[:-1] *= shift.context_sigma
    if shift.large_value is not None:
        place = generator.choice([index for index in range(length - 1) if index != first])
        values[place] = -deciding_sign * abs(shift.large_value)
    decided = np.arange(length) >= first
    return values.astype(np.float32), decided.astype(np.float32)


def linear(generator: np.random.Generator, length: int, shift: Shift) -> tuple[Numbers, Numbers]:
    """Return x_1, f(x_1), x_2, ..., x_length for one f(x) = ax + c, and the f(x_t) that are asked for at each x_t."""
    x = shift.sigma * generator.standard_normal(length)
    x[:-1] *= shift.context_sigma
    a, c = shift.function_sigma * generator.standard_normal(2)
    if shift.large_value is not None:
        x[generator.integers(max(1, length - 1))] = shift.large_value
    y = a * x + c
    return np.stack([x, y], -1).ravel()[:-1].astype(np.float32), y.astype(np.float32)


TASKS = {
    "every": Task(every, kinds=1, problem_type="multi_label_classification"),
    "some": Task(some, kinds=1, problem_type="multi_label_classification"),
    "linear": Task(linear, kinds=2, problem_type="regression"),
}
