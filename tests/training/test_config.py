"""A config is read from YAML and flags, and every mistake in it is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from titans.training.config import TrainConfig, describe_fields, load_config


def test_flags_go_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {name: mag, size: 10m}\nlength: 512\nbatch_tokens: 8192\nlearning_rate: 1e-3\n")
    flags = ["--learning-rate", "2e-3", "--model.memory_depth=1", "--gradient-checkpointing", "--carry", "2"]
    config = load_config(file, flags)
    assert config.model == {"name": "mag", "size": "10m", "memory_depth": 1}
    assert (config.length, config.learning_rate, config.gradient_checkpointing, config.carry) == (512, 2e-3, True, 2)
    assert (config.row_tokens, config.rows) == (1024, 8)


def test_numbers_may_be_written_as_people_write_them() -> None:
    config = load_config(
        None, ["--tokens", "15e9", "--batch-tokens", "524288", "--learning-rate", "4e-4", "--clip", "1"]
    )
    assert config.tokens == 15_000_000_000 and isinstance(config.tokens, int)
    assert config.total_steps(None) == round(15e9 / 524288)


def test_a_switch_takes_a_value_or_none() -> None:
    assert load_config(None, ["--compile"]).compile
    assert not load_config(None, ["--compile", "false"]).compile
    assert not load_config(None, ["--no-compile"]).compile
    assert load_config(None, ["--compile", "--length", "4096"]).compile


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lenght", "5"], "lenght is not a field of a training run: did you mean length?"),
        (["--learning_rte", "5"], "did you mean learning_rate?"),
        (["--zzz", "5"], "zzz is not a field of a training run: expected one of model, data"),
        (["length", "5"], "'length' is not a flag; expected --FIELD VALUE"),
        (["--length"], "--length has no value"),
        (["--length", "many"], "length is 'many'; expected a whole number"),
        (["--length", "0"], "length is 0; expected a whole number of at least 1"),
        (["--learning-rate", "0"], "learning_rate is 0.0; expected a positive number"),
        (["--learning-rate", "fast"], "learning_rate is 'fast'; expected a number"),
        (["--compile", "perhaps"], "compile is 'perhaps'; expected true or false"),
        (["--precision", "fp16"], "precision is 'fp16'; expected float32 or bf16"),
        (["--beta2", "1"], "beta2 is 1.0; expected a number from 0 to 1"),
        (["--tokens", "1000", "--steps", "5"], "tokens and steps are given; expected one of tokens, steps and epochs"),
        (["--batch-tokens", "5000"], "batch_tokens is 5,000; expected a multiple of 4,096, the tokens of one sequence"),
        (["--data", "hf://a/b", "--carry", "1"], "carry is for prepared data"),
        (["--data.name", "x"], "data.name is not a field of a training run"),
        (["--model", "mac"], "model is 'mac'; expected fields"),
        (["--device", "gpu"], "device is 'gpu'; expected auto or cpu or cuda or mps"),
        (["--push-to-hub", "my model"], "push_to_hub is 'my model'; expected OWNER/NAME"),
    ],
)
def test_what_is_wrong_is_one_sentence(flags: list[str], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_config(None, flags)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "does not exist; expected a YAML file"),
        ("", "holds no fields"),
        ("- a\n- b\n", "holds no fields"),
        ("length: [", "is not YAML"),
        ("optimiser: adam\n", "optimiser is not a field of a training run"),
    ],
)
def test_a_file_that_is_no_config_is_refused(text: str | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=words):
        load_config(file)


def test_a_batch_is_divided_among_processes() -> None:
    config = TrainConfig(length=16, batch_tokens=16 * 24, micro_batch=5)
    assert config.accumulation(1) == (4, 6)
    assert config.accumulation(2) == (4, 3)
    assert config.accumulation(8) == (3, 1)
    with pytest.raises(ValueError, match=r"a batch has 24 sequences .* and there are 5 processes; expected a multiple"):
        config.accumulation(5)


def test_the_length_of_a_run_follows_from_tokens_steps_or_epochs() -> None:
    fields = {"length": 10, "batch_tokens": 100}
    assert TrainConfig(**fields, steps=7).total_steps(5000) == 7  # type: ignore[arg-type]
    assert TrainConfig(**fields, tokens=1000).total_steps(5000) == 10  # type: ignore[arg-type]
    assert TrainConfig(**fields, epochs=2.0).total_steps(5000) == 100  # type: ignore[arg-type]
    assert TrainConfig(**fields).total_steps(5000) == 50  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="neither tokens nor steps"):
        TrainConfig(**fields).total_steps(None)  # type: ignore[arg-type]


def test_the_warm_up_is_a_share_or_a_number() -> None:
    assert TrainConfig(warmup=0.1).warmup_steps(200) == 20
    assert TrainConfig(warmup=30).warmup_steps(200) == 30


def test_every_field_is_listed_with_its_default() -> None:
    said = describe_fields()
    assert "learning_rate: 0.0004" in said and "length: 4096  Tokens per training sequence." in said
    assert len(said.splitlines()) == len(TrainConfig().to_dict())
    assert all(line.endswith(".") for line in said.splitlines()), "a field has no words"
