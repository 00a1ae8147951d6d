from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from titans import TitansConfig, TitansForCausalLM
from titans.experiments.memory_tests import (
    AGAIN,
    CHANGED,
    FILLERS,
    KNOWN,
    NEW,
    bound,
    capacity,
    decay_of_association,
    draw_facts,
    mean_surprise,
    surprise_of_facts,
)
from titans.tasks.recall import Recall

TASK = Recall(pairs=4, num_keys=16, num_values=16, num_fillers=16, lengths=(32,))


def pairs_held(**settings: Any) -> int:
    count: int = capacity(**{"depth": 1, "width": 16, "seeds": 4, **settings})["capacity"]
    return count


def model(variant: str = "lmm", **fields: Any) -> TitansForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": TASK.vocab_size, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    spans = {
        "segment_size": 8,
        "window_size": 8,
        "num_persistent_tokens": 3,
        "memory_heads": 2,
        "memory_local_heads": 0,
    }
    return TitansForCausalLM(TitansConfig(variant=variant, **{**sizes, **spans, **fields}))


def test_each_depth_width_and_momentum_has_a_row_and_a_wider_memory_holds_more() -> None:
    rows = [capacity(d, w, eta, seeds=4) for d in (1, 2) for w in (8, 16, 32) for eta in (0.0, 0.9)]
    json.dumps(rows, allow_nan=False)
    cells = [(row["depth"], row["width"], row["eta"], row["weights"]) for row in rows]
    assert cells == [(d, w, eta, d * w * w) for d in (1, 2) for w in (8, 16, 32) for eta in (0.0, 0.9)]
    for depth, eta in {(row["depth"], row["eta"]) for row in rows}:
        held = [row["capacity"] for row in rows if (row["depth"], row["eta"]) == (depth, eta)]
        assert held == sorted(set(held))
    for row in rows:
        assert row["recall"] >= 0.9
        assert row["recall"] == pytest.approx(sum(row["recalls"]) / 4)
        assert len(row["recalls"]) == 4


def test_a_linear_memory_holds_about_as_many_pairs_as_it_is_wide() -> None:
    assert 12 <= pairs_held() <= 24


def test_the_capacity_is_the_same_again_and_smaller_for_a_larger_share() -> None:
    assert pairs_held() == pairs_held()
    assert pairs_held(share=1.0) < pairs_held(share=0.5)


def test_pairs_that_are_written_more_often_are_held_better() -> None:
    assert pairs_held(depth=2, passes=8) > 1.5 * pairs_held(depth=2)


def test_the_best_step_counts() -> None:
    steps = {theta: pairs_held(thetas=(theta,)) for theta in (0.1, 1.0)}
    assert pairs_held(thetas=(0.1, 1.0)) >= max(steps.values())
    assert steps[0.1] > steps[1.0]


def test_what_was_just_written_by_a_whole_step_is_all_there() -> None:
    result = decay_of_association(alphas=(0.0,), etas=(0.0,), writes=(0,), depth=1, theta=1.0)
    [row] = result["rows"]
    assert row["lefts"] == pytest.approx([1.0] * 32)
    assert row["cosines"] == pytest.approx([1.0] * 32)
    json.dumps(result, allow_nan=False)


def test_what_is_left_of_an_association_falls_as_forgetting_says() -> None:
    writes = (0, 1, 4, 16, 64)
    result = decay_of_association(alphas=(0.0, 0.05, 0.2), etas=(0.0,), writes=writes, depth=1, width=64, theta=0.05)
    rows = {(row["alpha"], row["writes"]): row for row in result["rows"]}
    for alpha in (0.05, 0.2):
        for count in writes:
            left = rows[alpha, count]["left"] / rows[alpha, 0]["left"]
            assert left == pytest.approx((1 - alpha) ** count, abs=0.05)
    assert rows[0.0, 64]["left"] > 0.8 * rows[0.0, 0]["left"]
    assert rows[0.0, 64]["cosine"] < rows[0.0, 4]["cosine"] < rows[0.0, 0]["cosine"]


def test_a_deep_memory_that_forgets_everything_writes_as_a_new_one_does() -> None:
    result = decay_of_association(alphas=(0.0, 1.0), etas=(0.0,), writes=(0,), depth=2, samples=4)
    kept, forgot = (row["lefts"] for row in result["rows"])
    assert min(kept) > 0.1
    assert forgot == pytest.approx(kept)


def test_momentum_goes_on_writing_what_it_has_begun() -> None:
    result = decay_of_association(alphas=(0.0,), etas=(0.9,), writes=(0, 1, 8), depth=1, theta=0.5, samples=8)
    lefts = [row["left"] for row in result["rows"]]
    assert lefts[0] == pytest.approx(0.1 * 0.5)
    assert lefts[1] == pytest.approx(0.19 * 0.5, rel=0.05)
    assert lefts[1] < lefts[2] < 0.5


def test_a_curve_does_not_depend_on_where_it_is_looked_at() -> None:
    settings: dict[str, Any] = {"alphas": (0.01,), "etas": (0.9,), "samples": 4, "width": 16}
    [*_, whole] = decay_of_association(writes=(70,), **settings)["rows"]
    [*_, pieces] = decay_of_association(writes=(70, 3, 64, 0), **settings)["rows"]
    assert pieces["writes"] == 70
    assert pieces["lefts"] == pytest.approx(whole["lefts"], abs=1e-5)


@pytest.mark.parametrize("variant", ["lmm", "mac", "mag", "mal"])
def test_facts_that_are_new_surprise_more_than_those_that_are_repeated(variant: str) -> None:
    made = model(variant)
    before = {name: value.clone() for name, value in made.state_dict().items()}
    found = surprise_of_facts(made.train(), TASK, distance=16, sequences=32)
    json.dumps(found, allow_nan=False)
    assert found["parts"] == [[KNOWN, 8], [FILLERS, 16], [NEW, 8], [AGAIN, 8], [CHANGED, 8]]
    assert [len(layer) for layer in found["layers"]] == [48, 48]
    for layer in range(2):
        assert mean_surprise(found, AGAIN, layer) < 0.97 * mean_surprise(found, NEW, layer)
        # the first key comes before anything differs
        assert found["layers"][layer][32] == pytest.approx(found["layers"][layer][40])
    assert made.training
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    assert surprise_of_facts(made, TASK, 16, 32) == found != surprise_of_facts(made, TASK, 16, 32, seed=1)


def test_a_memory_that_binds_a_token_to_the_one_before_is_surprised_by_a_changed_fact() -> None:
    found = surprise_of_facts(bound(model(num_hidden_layers=1, memory_depth=1)), TASK)
    assert mean_surprise(found, CHANGED) > 1.1 * mean_surprise(found, AGAIN)


def test_the_versions_of_the_facts_differ_at_the_end_only() -> None:
    for number in range(50):
        versions = draw_facts(random.Random(number), TASK, 5)
        start, ends = versions[NEW][:-8], {fact: tokens[-8:] for fact, tokens in versions.items()}
        pairs = dict(zip(start[0:8:2], start[1:8:2], strict=True))
        assert all(tokens[:-8] == start for tokens in versions.values())
        assert len(start) == 8 + 5 and len(pairs) == len(set(pairs.values())) == 4
        assert dict(zip(ends[AGAIN][::2], ends[AGAIN][1::2], strict=True)) == pairs
        changed = dict(zip(ends[CHANGED][::2], ends[CHANGED][1::2], strict=True))
        assert changed.keys() == pairs.keys() and set(changed.values()) == set(pairs.values())
        assert all(changed[key] != pairs[key] for key in pairs)
        assert not set(ends[NEW]) & set(ends[AGAIN])


def test_the_mean_of_a_part_is_that_of_its_values() -> None:
    values = [9.0, 2.0] * 2 + [5.0] * 3 + [9.0, 0.5] * 2
    found = {"parts": [[KNOWN, 4], [FILLERS, 3], [NEW, 4]], "layers": [[0.0] * 11, values]}
    assert [mean_surprise(found, name, 1) for name in (KNOWN, FILLERS, NEW)] == [2.0, 5.0, 0.5]
    with pytest.raises(ValueError, match="name is 'old'; expected a part of the sequences"):
        mean_surprise(found, "old")


def test_wrong_arguments_are_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="thetas is empty; expected at least one number"):
        capacity(1, 8, thetas=())
    with pytest.raises(ValueError, match="seeds is 0; expected at least 1"):
        capacity(1, 8, seeds=0)
    with pytest.raises(ValueError, match=r"share is 1\.5; expected more than 0 and at most 1"):
        capacity(1, 8, share=1.5)
    with pytest.raises(ValueError, match="writes has -1; expected at least 0"):
        decay_of_association(writes=(-1,))
    with pytest.raises(ValueError, match="samples is 0; expected at least 1"):
        decay_of_association(samples=0)
    with pytest.raises(ValueError, match="the model has 48 tokens; expected at least 192, those of the task"):
        surprise_of_facts(model())
    with pytest.raises(ValueError, match="the task has 1 pairs; expected 2 to half"):
        surprise_of_facts(model(), Recall(pairs=1, num_keys=8, num_values=8, num_fillers=8))
    with pytest.raises(ValueError, match="distance is -1 and sequences is 64; expected at least 0 and at least 1"):
        surprise_of_facts(model(), TASK, distance=-1)
    with pytest.raises(ValueError, match="the model has no memory"):
        surprise_of_facts(model("mag", use_memory=False), TASK)
