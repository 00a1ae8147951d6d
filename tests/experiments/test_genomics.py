"""The experiment on DNA: what its networks compute, what they learn and what not, and that nothing is done twice."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.tasks.test_dna import draw, write_csv
from titans.cli import app
from titans.experiments import genomics
from titans.experiments.genomics import MODELS, GenomicsExperiment, correlation, plan, run_genomics
from titans.experiments.genomics_report import TUNED, genomics_sections
from titans.experiments.genomics_runs import (
    PARAMETERS,
    BenchmarkCNN,
    Run,
    SequenceClassifier,
    WordCounts,
    WordTokens,
    build_network,
    count_parameters,
    do_run,
    encode,
    other_strand,
)
from titans.tasks.dna import reverse_complement

SEQUENCE_MODELS = ("lmm", "mac", "mag", "mal", "mamba2", "llama")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set whose classes differ in how much G and C they have."""
    made = tmp_path_factory.mktemp("dna")
    rng = random.Random(0)
    rows = ["".join(rng.choices("ACGT", (3, 2, 2, 3) if n % 2 else (2, 3, 3, 2), k=64 + n % 9)) for n in range(240)]
    write_csv(made / "content.csv", rows)
    return made


def a_run(folder: Path, model: str = "lmm", **changes: Any) -> Run:
    fit = {**MODELS[model], "epochs": 6, **changes.pop("fit", {})}
    given: dict[str, Any] = {"fold": 0, "seed": 0, "word": 2, "stride": 8, "hidden_size": 16, "fit": fit, **changes}
    return Run(str(folder), "content", 3, False, model, **given)


@pytest.mark.parametrize("model", SEQUENCE_MODELS)
@torch.no_grad()
def test_padding_does_not_change_what_a_sequence_model_says(folder: Path, model: str) -> None:
    torch.manual_seed(0)
    network = build_network(a_run(folder, model), 2, 64, 0.0).double().eval()
    codes = encode(draw(1, 30))[0][None]
    padded = torch.nn.functional.pad(codes, (0, 21), value=4)
    torch.testing.assert_close(network(codes, torch.tensor([30])), network(padded, torch.tensor([30])))


@pytest.mark.parametrize("model", SEQUENCE_MODELS)
def test_sequence_models_have_about_as_many_parameters(folder: Path, model: str) -> None:
    network = build_network(a_run(folder, model, word=4, hidden_size=64), 2, 64, 0.0)
    assert count_parameters(network) == pytest.approx(PARAMETERS, rel=0.02)


@torch.no_grad()
def test_a_token_is_the_mean_of_its_words_and_knows_no_later_letter() -> None:
    tokens = WordTokens(2, 4, 8)
    codes = encode(["ACGTNACGTA"])[0][None]
    rows = {
        word: tokens.embedding.weight[4 * "ACGT".index(word[0]) + "ACGT".index(word[1])] for word in ("AC", "CG", "GT")
    }
    made = tokens(codes)
    assert made.shape == (1, 3, 8)
    torch.testing.assert_close(made[0, 0], (rows["AC"] + rows["CG"] + rows["GT"]) / 4)  # the first letter ends no word
    torch.testing.assert_close(made[0, 1], (rows["AC"] + rows["CG"]) / 4)  # nor does N, or what follows it
    changed = codes.clone()
    changed[0, 8] = 0
    assert torch.equal(tokens(changed)[0, :2], made[0, :2])


@torch.no_grad()
def test_words_of_one_letter_are_character_embeddings() -> None:
    tokens = WordTokens(1, 1, 8)
    codes = encode(["ACGTA"])[0][None]
    assert torch.equal(tokens(codes), tokens.embedding(codes))


@torch.no_grad()
def test_the_cnn_is_the_composition_of_its_layers() -> None:
    torch.manual_seed(0)
    cnn = BenchmarkCNN(100, 2).eval()
    codes = torch.stack(encode(draw(3, 100)))
    plain = cnn.dense(cnn.rest(cnn.first(cnn.embedding(codes).transpose(1, 2))))
    torch.testing.assert_close(cnn(codes, torch.tensor([100] * 3)), plain, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_counts_of_words_are_the_same_on_both_strands_and_codes_turn_as_letters_do() -> None:
    sequence = "ACGTNNACGGTTACGATT"
    (codes,), (turned,) = encode([sequence]), encode([reverse_complement(sequence)])
    assert torch.equal(other_strand(codes), turned)
    counts = WordCounts(2).eval()
    length = torch.tensor([len(sequence)])
    torch.testing.assert_close(counts(codes[None], length), counts(turned[None], length))


def test_pretraining_learns_what_comes_next(folder: Path) -> None:
    from titans.experiments.genomics_runs import Fit, pretrain

    torch.manual_seed(0)
    network = build_network(a_run(folder, word=1, stride=1), 2, 64, 0.0)
    assert isinstance(network, SequenceClassifier)
    codes = encode(["ACGT" * 8] * 32)
    head = torch.nn.Linear(16, 4)
    before = float(network.next_token_loss(torch.stack(codes), head).detach())
    pretrain(network, codes, Fit(pretraining=10, batch_size=8, learning_rate=1e-2, dropout=0.0, both_strands=False))
    with torch.no_grad():
        hidden = network.backbone(inputs_embeds=network.tokens(torch.stack(codes[:1]))).last_hidden_state[0]
    assert before > 1.0
    assert torch.cdist(hidden[8:12], hidden[12:16]).argmin(1).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("model", ["lmm", "word-counts"])
def test_a_model_learns_the_classes_and_with_shuffled_labels_nothing(folder: Path, model: str) -> None:
    fit = {"epochs": 4, "batch_size": 16, "learning_rate": 1e-2, "smoothing": 0.0, "dropout": 0.0}
    learned = do_run(a_run(folder, model, fit=fit))
    assert learned["accuracy"] > 0.75
    assert sum(map(sum, learned["confusion"])) == learned["test"] == 80
    shuffled = [do_run(a_run(folder, model, fit=fit, shuffled=True, fold=fold))["accuracy"] for fold in (0, 1)]
    assert 0.38 < sum(shuffled) / 2 < 0.62  # three standard errors around chance


def test_runs_that_are_done_are_kept_and_other_settings_are_not(folder: Path, tmp_path: Path) -> None:
    models = ("lmm", "lmm-memory-off", "cnn", "lmm-pretrained")
    experiment = GenomicsExperiment(
        str(folder),
        models,
        folds=3,
        only_folds=2,
        word=2,
        stride=8,
        hidden_size=16,
        fit={"epochs": 1},
        limit=32,
        at_a_time=1,
    )
    first = run_genomics(experiment, tmp_path)
    assert len(first["runs"]) == 8 and not first["failed"]
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").glob("*.json")}
    (tmp_path / "runs" / "content-cnn-1-0.json").unlink()
    again = run_genomics(experiment, tmp_path)
    changed = {file.name for file, stamp in times.items() if file.stat().st_mtime_ns != stamp}
    assert changed == {"content-cnn-1-0.json"}
    for row, other in zip(first["summary"], again["summary"], strict=True):
        assert row["accuracies"] == other["accuracies"]
    page = (tmp_path / "genomics.md").read_text()
    assert "3-fold cross-validation inside the data" in page and "LMM, memory off" in page
    assert (tmp_path / "genomics-content.png").is_file()
    assert json.loads((tmp_path / "genomics.json").read_text())["missing"] == 0
    seeds = GenomicsExperiment(**{**vars(experiment), "seeds": (1,)})
    assert all(not run.file(tmp_path).exists() for run in plan(seeds))


def test_a_perfect_guess_correlates_and_a_constant_one_does_not() -> None:
    assert correlation([[5, 0, 0], [0, 3, 0], [0, 0, 9]]) == pytest.approx(1.0)
    assert correlation([[5, 0], [7, 0]]) == 0.0
    assert correlation([[0, 4], [4, 0]]) == pytest.approx(-1.0)
    assert correlation([[6, 2], [1, 3]]) == pytest.approx((6 * 3 - 2 * 1) / (8 * 4 * 7 * 5) ** 0.5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--models", "mamba"], "models has 'mamba': did you mean mamba2?"),
        (["--folds", "1"], "folds is 1; expected at least 2"),
        (["--seeds", "0,0"], "seeds has 0 more than once"),
        (["--models", ","], "models is empty; expected at least one"),
        (["--epochs", "0"], "--epochs"),
        (["--models", "lmm-shuffled", "--control-folds", "0"], "control_folds is 0; expected at least 1"),
    ],
)
def test_a_mistyped_option_is_one_sentence(folder: Path, tmp_path: Path, options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["experiment", "genomics", str(folder), "--out", str(tmp_path / "out"), *options])
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_the_command_refuses_data_whose_splits_share_sequences(tmp_path: Path) -> None:
    sequences = draw(8)
    write_csv(tmp_path / "train_x.csv", sequences)
    write_csv(tmp_path / "test_x.csv", [reverse_complement(sequences[0]), *draw(3, seed=1)])
    result = CliRunner().invoke(app, ["experiment", "genomics", str(tmp_path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "in more than one of its parts" in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fit", "words"),
    [
        ({"epochs": 0}, "epochs is 0; expected at least 1"),
        ({"pretraining": -1}, "pretraining is -1; expected at least 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; expected a positive number"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0; expected a number from 0"),
        ({"dropout": 1.0}, "dropout is 1.0; expected a number from 0 and below 1"),
    ],
)
def test_training_that_makes_no_sense_is_refused_before_it_starts(fit: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GenomicsExperiment("nowhere", fit=fit)


@pytest.mark.parametrize("limit", [50, 79, 80, 200])
def test_a_limit_is_never_exceeded(folder: Path, limit: int) -> None:
    done = do_run(a_run(folder, "word-counts", fit={"epochs": 1}, limit=limit))
    assert 0 < done["train"] <= limit and 0 < done["test"] <= limit


def test_what_failed_is_on_the_page(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_in_part(run: Run) -> dict[str, Any]:
        if run.fold == 1:
            raise ValueError("no such thing")
        return do_run(run)

    monkeypatch.setattr(genomics, "do_run", fail_in_part)
    experiment = GenomicsExperiment(str(folder), ("word-counts",), folds=3, fit={"epochs": 1}, at_a_time=1)
    with pytest.raises(ValueError, match=r"^1 of 3 runs failed, the first one content-word-counts-1-0: no such thing"):
        run_genomics(experiment, tmp_path)
    page = (tmp_path / "genomics.md").read_text()
    assert "Without figures: 1 of 3 runs." in page and "| content-word-counts-1-0 | no such thing" in page


def test_the_fold_that_no_setting_was_chosen_on_has_a_column_of_its_own() -> None:
    about = {"protocol": "", "classes": ["a", "b"], "sequences": 9, "longest": 9, "copies": 0, "majority": 0.5}
    row = {
        "model": "cnn", "runs": 2, "parameters": 1, "accuracies": {"0/0": 0.75, "1/0": 0.25}, "one_strand": [0.5],
        "mcc": [0.5], "test": 9, "confusion": [], "seconds": 1.0,
    }  # fmt: skip
    names = ("human_enhancers_cohn", "content")
    sections = genomics_sections(
        {
            "summary": [{**row, "data": name} for name in names],
            "data": {name: {**about, "folds": 5} for name in names},
            "experiment": {"word": 4, "stride": 8}, "missing": 0, "runs": [], "failed": {},
        }
    )  # fmt: skip
    tuned, other = sections
    assert TUNED in tuned.paragraphs and TUNED not in other.paragraphs
    assert tuned.tables[0].header[2] == "fold 0 (%)" and tuned.tables[0].rows[0][2] == "75.0"
    assert tuned.tables[0].rows[0][1] == other.tables[0].rows[0][1] == "50.0 ± 35.4"
    assert "fold 0 (%)" not in other.tables[0].header


@pytest.mark.slow
def test_the_command_runs_every_model_side_by_side(folder: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["experiment", "genomics", str(folder), "--out", str(tmp_path), "--quick"])
    assert result.exit_code == 0, result.output
    assert "Titans MAC" in result.output and (tmp_path / "quick" / "report.html").is_file()
