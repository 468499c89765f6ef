"""How probable a language model finds a sentence: the scorings of minimal-pair benchmarks.

Sequences are scored in batches of similar length; the result does not depend on the batch size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

# Token ids to put in, positions whose logits to read, and the tokens that are expected there.
_Item = tuple[Sequence[int], Sequence[int], Sequence[int]]


def pseudo_log_likelihoods(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    mask_token_id: int,
    special_ids: Sequence[int] = (),
    batch_size: int = 128,
) -> list[float]:
    """Sum log p(token | all others) over the tokens of each sequence, masking one at a time (Salazar et al., 2020).

    Args:
        model: masked language model, in evaluation mode.
        sequences: token ids with special tokens.
        mask_token_id: what stands in a token's place.
        special_ids: tokens that are not scored, such as the one that begins a sentence.
        batch_size: sequences at once.

    Returns:
        Nats, one for each sequence.
    """
    items: list[_Item] = []
    owners = []
    for owner, ids in enumerate(sequences):
        for position, token in enumerate(ids):
            if token not in special_ids:
                items.append(([*ids[:position], mask_token_id, *ids[position + 1 :]], [position], [token]))
                owners.append(owner)
    sums = [0.0] * len(sequences)
    for owner, value in zip(owners, _log_probabilities(model, items, batch_size), strict=True):
        sums[owner] += value
    return sums


def unmasked_cross_entropies(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    batch_size: int = 128,
) -> list[float]:
    """Average -log p(token | the sequence itself) over all tokens, special ones too: BabyBERTa's scoring.

    Nothing is masked, so the model sees each token it is asked for (Huebner et al., 2021).

    Args:
        model: masked language model, in evaluation mode.
        sequences: token ids with special tokens.
        batch_size: sequences at once.

    Returns:
        Nats a token, one for each sequence; lower is more probable.
    """
    items: list[_Item] = [(ids, range(len(ids)), ids) for ids in sequences]
    sums = _log_probabilities(model, items, batch_size)
    return [-value / len(ids) for value, ids in zip(sums, sequences, strict=True)]


def log_likelihoods(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    batch_size: int = 128,
) -> list[float]:
    """Sum log p(token | those before it) over each sequence, but for its first token.

    Args:
        model: decoder, in evaluation mode.
        sequences: token ids; the first one begins the text and is not scored.
        batch_size: sequences at once.

    Returns:
        Nats, one for each sequence.
    """
    items: list[_Item] = [(ids, range(len(ids) - 1), ids[1:]) for ids in sequences]
    return _log_probabilities(model, items, batch_size)


@torch.no_grad()
def _log_probabilities(model: PreTrainedModel, items: Sequence[_Item], batch_size: int) -> list[float]:
    """Sum the log-probabilities of each item's expected tokens."""
    sums = [0.0] * len(items)
    order = sorted(range(len(items)), key=lambda index: len(items[index][0]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        rows = torch.tensor([row for row, index in enumerate(chosen) for _ in items[index][1]])
        positions = torch.tensor([position for index in chosen for position in items[index][1]])
        expected = torch.tensor([token for index in chosen for token in items[index][2]])
        logits = _logits(model, [items[index][0] for index in chosen], rows, positions).float()
        found = logits.log_softmax(-1).gather(-1, expected.to(logits.device)[:, None])[:, 0].double().cpu()
        for index, value in zip(
            chosen, torch.zeros(len(chosen), dtype=torch.float64).index_add(0, rows, found).tolist(), strict=True
        ):
            sums[index] = value
    return sums


def _logits(model: PreTrainedModel, sequences: Sequence[Sequence[int]], rows: Tensor, positions: Tensor) -> Tensor:
    """Return the logits at these positions of these rows, (number of positions, vocabulary)."""
    longest = max(map(len, sequences))
    # On the right, with the padding token: RoBERTa numbers positions by it.
    padding = model.config.pad_token_id or 0
    ids = torch.tensor([[*ids, *[padding] * (longest - len(ids))] for ids in sequences], device=model.device)
    lengths = torch.tensor([len(ids) for ids in sequences], device=model.device)
    mask = (torch.arange(longest, device=model.device) < lengths[:, None]).long()
    # The head is a quarter of the work of a small model: it need not see the other positions.
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, hidden: (hidden[0][rows, positions],))
    try:
        logits: Tensor = model(ids, attention_mask=mask).logits
    finally:
        hook.remove()
    return logits
