"""The scorings of sentences, against their definitions and against minicons."""

import pytest
import torch

from ssa_hf.likelihood import log_likelihoods, pseudo_log_likelihoods, unmasked_cross_entropies

from .conftest import VOCAB, tiny_model

MASK, BEGIN, END = VOCAB - 1, 1, 2


@pytest.fixture
def sequences():
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 9, 4, 4, 7, 2, 12]
    return [[BEGIN, *torch.randint(3, MASK, (n,), generator=generator).tolist(), END] for n in lengths]


@pytest.mark.parametrize("implementation", ["ssa", "sdpa"])
def test_pseudo_log_likelihood_masks_one_token_at_a_time(implementation, sequences):
    model = tiny_model("roberta", implementation)
    expected = []
    for ids in sequences:
        total = 0.0
        for position in range(1, len(ids) - 1):
            masked = torch.tensor([ids])
            masked[0, position] = MASK
            with torch.no_grad():
                total += model(masked).logits[0, position].log_softmax(-1)[ids[position]].item()
        expected.append(total)
    assert pseudo_log_likelihoods(model, sequences, MASK, (BEGIN, END)) == pytest.approx(expected, abs=1e-4)


def test_unmasked_cross_entropy_is_the_models_own_loss(sequences):
    model = tiny_model("roberta")
    with torch.no_grad():
        expected = [model(torch.tensor([ids]), labels=torch.tensor([ids])).loss.item() for ids in sequences]
    assert unmasked_cross_entropies(model, sequences) == pytest.approx(expected, abs=1e-5)


def test_log_likelihood_is_the_decoders_own_loss(sequences):
    model = tiny_model("llama")
    with torch.no_grad():
        expected = [
            -model(torch.tensor([ids]), labels=torch.tensor([ids])).loss.item() * (len(ids) - 1) for ids in sequences
        ]
    assert log_likelihoods(model, sequences) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_the_batch_size_does_not_matter(batch_size, sequences):
    encoder, decoder = tiny_model("roberta"), tiny_model("nemotron")
    for score in (
        lambda size: pseudo_log_likelihoods(encoder, sequences, MASK, (BEGIN, END), size),
        lambda size: unmasked_cross_entropies(encoder, sequences, size),
        lambda size: log_likelihoods(decoder, sequences, size),
    ):
        assert score(batch_size) == pytest.approx(score(64), abs=1e-4)


def test_pseudo_log_likelihood_agrees_with_minicons(tmp_path):
    scorer = pytest.importorskip("minicons.scorer")
    from ssa_hf.recipes.tokenizer import train_masked_lm_tokenizer

    sentences = ["the dog runs .", "the dogs run .", "where is the big dog ?", "it is not here !"]
    tokenizer = train_masked_lm_tokenizer(sentences * 5, 280)
    tokenizer.batch_encode_plus = tokenizer.__call__  # minicons 0.3.39 calls it; transformers 5 has it no more
    model = tiny_model("roberta", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    theirs = scorer.MaskedLMScorer(model, "cpu", tokenizer=tokenizer).sequence_score(
        sentences, reduction=lambda values: values.sum(0).item()
    )
    ids = tokenizer(sentences)["input_ids"]
    ours = pseudo_log_likelihoods(model, ids, tokenizer.mask_token_id, tokenizer.all_special_ids)
    assert ours == pytest.approx(theirs, abs=1e-3)
