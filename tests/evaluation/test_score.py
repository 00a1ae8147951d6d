"""An answer counts as right exactly when a greedy model would have said it, however the sequences are read."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, Mamba2Config, PreTrainedModel

from titans import TitansConfig, TitansForCausalLM
from titans.evaluation import score as module
from titans.evaluation.score import score, score_each
from titans.tasks import Answer, Example

VOCABULARY = 40


def model_of(variant: str, **fields: object) -> TitansForCausalLM:
    torch.manual_seed(0)
    config = TitansConfig(
        variant=variant, vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        memory_heads=1, segment_size=8, window_size=8, num_persistent_tokens=2, intermediate_size=32,
        initializer_range=0.5, **fields,
    )  # fmt: skip
    return TitansForCausalLM(config).double().eval()


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).double().eval()


def mamba() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_heads=4, head_dim=8, state_size=8, n_groups=1,
        chunk_size=8, initializer_range=0.5,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).double().eval()


def make(name: str) -> PreTrainedModel:
    return {"llama": llama, "mamba2": mamba}[name]() if name in ("llama", "mamba2") else model_of(name)


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(1, VOCABULARY), k=count)  # generate takes 0 for padding


def questions(count: int = 5) -> list[Example]:
    """Sequences of different lengths, each with an answer inside and one of three tokens at the end."""
    made = []
    for seed in range(count):
        ids = tokens(seed, 20 + 3 * seed)
        answers = [Answer(7, (ids[7],)), Answer(len(ids) - 3, tuple(ids[-3:]))]
        made.append(Example(ids, answers, boundary=len(ids) - 6))
    return made


@pytest.mark.parametrize("variant", ["lmm", "mac", "mag", "mal", "llama"])
def test_an_answer_is_right_exactly_if_greedy_generation_says_it(variant: str) -> None:
    model = llama() if variant == "llama" else model_of(variant)
    prompt = tokens(3, 18)
    said = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    said = said[0, len(prompt) :].tolist()
    wrong = [*said[:3], (said[3] + 1) % VOCABULARY]
    examples = [Example(prompt + answer, [Answer(len(prompt), tuple(answer))]) for answer in (said, wrong)]
    [[first], [second]] = score(model, examples)
    assert first.right and not second.right
    assert first.tokens == 4


@pytest.mark.parametrize("variant", ["mac", "lmm", "llama", "mamba2"])
def test_the_loss_is_that_of_the_answers_tokens_and_no_batching_changes_it(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, examples = make(variant), questions()
    together = score(model, examples)
    monkeypatch.setattr(module, "STEP", 7)
    in_pieces = score(model, examples, tokens_at_once=60)
    for each, scores, others in zip(examples, together, in_pieces, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([each.tokens]), use_cache=False).logits[0].float()
        losses = F.cross_entropy(logits, torch.tensor(each.labels()), ignore_index=-100, reduction="none")
        assert sum(answer.loss for answer in scores) == pytest.approx(float(losses.sum()), abs=1e-4)
        assert [answer.loss for answer in scores] == pytest.approx([answer.loss for answer in others], abs=1e-4)


@pytest.mark.parametrize("variant", ["lmm", "mac", "mag", "mal"])
def test_controls_change_the_memory_and_nothing_else(variant: str) -> None:
    model, examples = model_of(variant), questions()

    def losses(control: str | None, of: list[Example] = examples) -> list[float]:
        return [answers[-1].loss for answers in score(model, of, control)]

    ends = [Example(e.tokens, e.answers[-1:], e.boundary) for e in examples]
    plain = losses(None)
    for control in ("reset", "swap", "no-writes"):
        assert max(abs(a - b) for a, b in zip(plain, losses(control, ends), strict=True)) > 1e-3, control
    same = [ends[0], ends[0]]
    assert losses("swap", same) == pytest.approx(losses(None, same), abs=1e-5)  # its own memory, from another
    off = model_of(variant, memory_writes=False)
    off.load_state_dict(model.state_dict())
    assert losses("no-writes") == pytest.approx([answers[-1].loss for answers in score(off, examples)], abs=1e-5)
    assert losses(None) == plain  # and the model is as it was


@pytest.mark.parametrize("variant", ["lmm", "mac", "mag", "mal"])
def test_a_text_is_read_once_for_all_that_is_asked_of_it(variant: str) -> None:
    model, examples = model_of(variant), questions()
    read: list[int] = []
    model.register_forward_pre_hook(lambda _, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True)
    together = score_each(model, examples, [None, "reset", "swap"])
    assert sum(read) < 5 * (max(e.boundary for e in examples) + 3 * 6 + module.STEP)
    for control, found in together.items():
        alone = score(model, examples, control)
        losses = [[answer.loss for answers in each for answer in answers] for each in (found, alone)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5), control


@pytest.mark.parametrize("control", ["reset", "swap"])
def test_a_tampered_batch_gives_what_each_of_its_sequences_gives(control: str) -> None:
    model = model_of("mac")
    examples = sorted(questions(), key=lambda each: -len(each.tokens))  # in the order of the batch
    together = score(model, examples, control)
    for index in range(4):
        alone = score(model, examples[index : index + 2], control)[0]
        assert [s.loss for s in together[index]] == pytest.approx([s.loss for s in alone], abs=1e-5)


def test_of_windows_alone_only_the_end_is_read_and_says_the_same() -> None:
    model = model_of("mag", use_memory=False)
    ids = tokens(0, 90)
    example = Example(ids, [Answer(87, tuple(ids[87:]))], 80)
    read: list[int] = []
    model.register_forward_pre_hook(lambda _, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True)
    [[found]] = score(model, [example])
    assert sum(read) == 90 - 86 + 2 * 7
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    labels = torch.tensor(example.labels())
    assert found.loss == pytest.approx(float(F.cross_entropy(logits, labels, reduction="sum")), abs=1e-5)


def test_a_swapped_memory_is_the_one_of_the_next_sequence() -> None:
    """LMM without convolution has nothing but its memory: the question comes after the other's text."""
    model = model_of("lmm", memory_conv_kernel=0)
    first, second = tokens(1, 24), tokens(2, 24)
    asked = tokens(3, 6)
    examples = [Example(text + asked, [Answer(27, tuple(asked[3:]))], 24) for text in (first, second)]
    plain, swapped = score(model, examples), score(model, examples, "swap")
    assert [s[0].loss for s in swapped] == pytest.approx([p[0].loss for p in plain[::-1]], abs=1e-5)


def test_what_cannot_be_scored_is_one_sentence() -> None:
    model = model_of("mac")
    with pytest.raises(ValueError, match="control is 'off'; expected one of no-writes, reset, swap"):
        score(model, questions(), "off")
    with pytest.raises(ValueError, match="the model has no memory"):
        score(llama(), questions(), "reset")
    with pytest.raises(ValueError, match="there is one sequence; expected at least two"):
        score(model, questions(1), "swap")
    with pytest.raises(ValueError, match="the task has the token 40 and the model knows 40"):
        score(model, [Example([40, 1], [Answer(1, (1,))])])
    with pytest.raises(ValueError, match="a sequence has 65 tokens; expected at most 64"):
        score(llama(), [Example(tokens(0, 65), [Answer(64, (1,))])])
