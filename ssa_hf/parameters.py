"""Trained values of an attention module that stay float32, whatever the rest of the model is cast to."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init


class ScoringParameters(nn.Module):
    """What a scoring trains in one attention module; always float32, even after ``.to(torch.bfloat16)``.

    At 1.5 a bfloat16 step is 0.0078, so small updates would vanish. The name under which it is attached ends in
    ``_norm`` on purpose: Trainer's own rule then keeps weight decay off it.

    Args:
        num_heads: query heads of the attention module.
        options: the scoring with its options.
    """

    def __init__(self, num_heads: int, options: Any) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.config = options

    def reset_parameters(self) -> None:
        """Set the values to their configured initial ones, unless a checkpoint has just set them.

        transformers marks loaded tensors ``_is_hf_initialized``; its init functions honour that.
        """
        raise NotImplementedError

    def values(self) -> dict[str, Tensor]:
        """Return the values by name as logs show them: one for each head, or one for all, (num_heads,) or (1,)."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Describe the module in ``print(model)``."""
        return f"num_heads={self.num_heads}, {self.config}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ScoringParameters":
        # Follow every move between devices, refuse every change of dtype.
        def keep_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == torch.float32 else tensor.to(moved.device)

        return super()._apply(keep_float32, recurse)


class HeadParameters(ScoringParameters):
    """One unconstrained trained value for each query head under each name; there may be none.

    Args:
        num_heads: query heads of the attention module.
        options: the scoring with its options.
        initial: initial values by name.
        device: where to create the parameters.
    """

    def __init__(
        self, num_heads: int, options: Any, initial: Mapping[str, float], device: torch.device | str | None = None
    ) -> None:
        super().__init__(num_heads, options)
        self.initial = dict(initial)
        for name in initial:
            value = torch.empty(num_heads, dtype=torch.float32, device=device)
            self.register_parameter(name, nn.Parameter(value))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the values to their initial ones, unless a checkpoint has just set them."""
        for name, value in self.initial.items():
            init.constant_(getattr(self, name), value)

    def forward(self) -> dict[str, Tensor]:
        """Return the values by name, (num_heads,) each. Attention calls this rather than reading them.

        Offloading (accelerate), FSDP and ZeRO-3 bring parameters into place by hooks on a module's call.
        """
        return self.values()

    def values(self) -> dict[str, Tensor]:
        """Return the values by name, (num_heads,) each."""
        return {name: getattr(self, name) for name in self.initial}
