from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.evaluation.choices import choice_scores, log_likelihoods
from titans import TitansConfig, TitansForCausalLM
from titans.evaluation import harness
from titans.evaluation.evaluate import evaluate
from titans.evaluation.harness import TASKS, LmEval, definitions, local_tasks, run_harness
from titans.evaluation.measure import Evaluation
from titans.models.tokenizer import byte_tokenizer

lm_eval = pytest.importorskip("lm_eval")

BYTES = byte_tokenizer()
CHOICES = [
    {"query": "Question: how do I open a jar?\nAnswer:", "choices": ["Twist its lid.", "Eat."], "gold": 0},
    {"query": "A man is on a roof. He", "choices": ["sings", "skis away from it all", "removes a tile"], "gold": 2},
    {"query": "Two and two are", "choices": ["ñññ", "cats"], "gold": 1},  # likelier per byte, and per character
    {"query": "Two and two are", "choices": ["four", "five", "fünf", "6"], "gold": 0},
    {"query": "The sea is ", "choices": ["dry", "wet"], "gold": 1},
    {"query": "", "choices": ["A text with nothing before it", "x"], "gold": 1},
]
SCHEMA = [
    {"context_options": ["Ann beat Eve as Ann", "Ann beat Eve as Eve"], "continuation": "was fast.", "gold": 0},
    {"context_options": ["The cup fell, so the cup", "The cup fell, so the cat"], "continuation": "broke.", "gold": 0},
    {"context_options": ["It rained on Bo. Bo", "It rained on Bo. It"], "continuation": "got wet.", "gold": 0},
]
# rows of the tasks of the paper, some in the fields of the original data and some in others
PAPER: dict[str, list[dict[str, Any]]] = {
    "piqa": [
        {"goal": "open a jar", "sol1": "twist its lid", "sol2": "eat its lid", "label": 0},
        {"query": "Question: dry a cat\n", "choices": ["wait", "use an oven"], "gold": 1},
    ],
    "hellaswag": [
        {
            "activity_label": "Roofing", "ctx_a": "A man [is] on a roof.", "ctx_b": "he", "label": 2,
            "endings": ["skis.", "sings [title] aloud.", "removes a tile.", "is a cube."],
        },
        {
            "activity_label": "Cooking", "ctx_a": "A pot boils.", "ctx_b": "the cook", "label": 0,
            "endings": ["stirs.", "flies to the moon.", "boils.", "pots."],
        },
    ],
    "winogrande": [
        {"sentence": "Ann beat Eve because _ was fast.", "option1": "Ann", "option2": "Eve", "answer": "1"},
        SCHEMA[1],
    ],
    "arc_easy": [{"query": "Question: What melts?", "choices": ["ice", "fire", "air"], "gold": 0}] * 2,
    "arc_challenge": [
        {
            "question": {"stem": "What burns?", "choices": [{"text": t, "label": t[0]} for t in ("ice", "wood")]},
            "answerKey": "w",
        }
    ],
    "social_iqa": [
        {
            "context": "Kai fell.", "question": "What will Kai want?", "answerA": "help", "answerB": "a song",
            "answerC": "nothing", "label": 1,
        }
    ],
    "boolq": [{"title": "Ice", "passage": "Ice is cold.", "question": "is ice cold", "answer": True}],
    "lambada_openai": [{"context": "She fed the cat and stroked the", "continuation": "cat"}],
}  # fmt: skip


def _titans(**fields: Any) -> TitansForCausalLM:
    torch.manual_seed(0)
    small: dict[str, Any] = {
        "variant": "mac", "vocab_size": 257, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "segment_size": 8, "num_persistent_tokens": 2, "memory_heads": 2, "initializer_range": 0.5,
        "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256,
    }  # fmt: skip
    return TitansForCausalLM(TitansConfig(**small | fields)).eval()


def _llama(longest: int = 512) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=longest, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(autouse=True)
def no_report_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval lists all installed packages after each run, which takes seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    _write(folder / "choices.jsonl", CHOICES)
    _write(folder / "schema.jsonl", SCHEMA)
    return folder


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paper")
    for name, rows in PAPER.items():
        _write(folder / f"{name}.jsonl", rows)
    return folder


def _as_it_is(model: Any, definitions: list[dict[str, Any]]) -> dict[str, Any]:
    """What lm-eval itself makes of a model, nothing of ours between."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    result: dict[str, Any] = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=BYTES, batch_size=3),
        tasks=definitions,
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    return result


@pytest.mark.parametrize("make", [_titans, _llama])
def test_our_loop_and_our_cells_give_the_scores_of_lm_eval(own: Path, make: Any) -> None:
    model = make()
    found = _as_it_is(model, list(local_tasks(own).values()))
    cells = run_harness(model, BYTES, ["schema", "choices"], data=own)
    for cell, name, rows in zip(cells, ("schema", "choices"), (SCHEMA, CHOICES), strict=True):
        ours = choice_scores(model, BYTES, rows)
        theirs = [[float(score) for (score, _) in sample["filtered_resps"]] for sample in found["samples"][name]]
        for mine, other in zip(ours["loglikelihoods"], theirs, strict=True):
            assert mine == pytest.approx(other, abs=1e-4)
        assert min(abs(a - b) for scores in theirs for a in scores for b in scores if a is not b) > 1e-3
        assert ours["acc"] == found["results"][name]["acc,none"] == cell["value"]
        assert ours["acc_norm"] == found["results"][name].get("acc_norm,none") == cell["metrics"].get("acc_norm")
        assert cell["group"] == {"task": name}
        assert cell["values"] == ours["values"]
        assert cell["low"] <= cell["value"] <= cell["high"]


def test_the_papers_tasks_on_local_files_have_lm_evals_prompts(paper: Path) -> None:
    model = _titans()
    found = _as_it_is(model, list(local_tasks(paper).values()))
    first = {name: found["samples"][name][0]["arguments"][0] for name in TASKS}
    assert first["piqa"] == ("Question: open a jar\nAnswer:", " twist its lid")
    assert first["hellaswag"] == ("Roofing: A man on a roof. He", " skis.")
    assert found["samples"]["hellaswag"][0]["arguments"][1][1] == " sings. aloud."
    assert first["winogrande"] == ("Ann beat Eve because Ann", " was fast.")
    assert first["arc_easy"] == ("Question: What melts?\nAnswer:", " ice")
    assert first["arc_challenge"] == ("Question: What burns?\nAnswer:", " ice")
    assert first["social_iqa"] == ("Q: Kai fell. What will Kai want?\nA:", " help")
    assert first["boolq"] == ("Ice -- Ice is cold.\nQuestion: is ice cold?\nAnswer:", " no")
    assert first["lambada_openai"] == ("She fed the cat and stroked the", " cat")
    for name in TASKS:
        for sample in found["samples"][name]:
            scores = [float(score) for (score, _) in sample["filtered_resps"]]
            assert log_likelihoods(model, BYTES, sample["arguments"]) == pytest.approx(scores, abs=1e-4)
    cells = run_harness(model, BYTES, list(TASKS), data=paper)
    assert [(cell["group"]["task"], cell["metric"]) for cell in cells] == [
        (name, metric) for name, (metric, _) in TASKS.items()
    ]
    assert [cell["count"] for cell in cells] == [len(PAPER[name]) for name in TASKS]
    for cell in cells:
        assert cell["value"] == found["results"][cell["group"]["task"]][f"{cell['metric']},none"]


def test_hellaswag_as_text_is_judged_up_to_the_limit(tmp_path: Path) -> None:
    (tmp_path / "hellaswag.txt").write_text("Roofing: he\n1\na\nb\nc\nd\n" * 3)
    (cell,) = run_harness(_titans(), BYTES, ["hellaswag"], data=tmp_path, limit=2)
    assert cell["count"] == 2
    assert cell["values"] == [cell["value"]] * 2


def _generation(folder: Path, rows: list[dict[str, str]], new_tokens: int, **more: Any) -> None:
    """A task for lm-eval that asks for text."""
    _write(folder / "rows.jsonl", rows)
    data = {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder / "cache")}
    lines = {
        "task": "say", "dataset_path": "json", "dataset_kwargs": data, "test_split": "test",
        "output_type": "generate_until", "doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"max_gen_toks": new_tokens, "do_sample": False, "until": ["\u0000"]},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    } | more  # fmt: skip
    (folder / "say.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in lines.items()))


def test_texts_of_different_lengths_are_continued_side_by_side_as_they_are_alone(tmp_path: Path) -> None:
    model = _titans()
    rows = []
    for prompt in ("Once", "Once upon a time there was", "A boat", "In the harbour of the old town"):
        ids = torch.tensor([list(prompt.encode())])
        said = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        rows.append({"prompt": prompt, "answer": BYTES.decode(said, skip_special_tokens=True)})
    assert len({row["answer"] for row in rows}) > 1
    _generation(tmp_path, rows, new_tokens=6)
    (cell,) = run_harness(model, BYTES, ["say"], include_path=tmp_path, batch_size=3)
    assert (cell["metric"], cell["values"]) == ("exact_match", [1.0] * 4)


def test_values_are_those_of_the_filter_that_the_metric_is_reported_for(tmp_path: Path) -> None:
    words = [{"function": "regex", "regex_pattern": "never"}, {"function": "take_first"}]
    filters = [{"name": "words", "filter": words}, {"name": "plain", "filter": [{"function": "take_first"}]}]
    _generation(tmp_path, [{"prompt": "a", "answer": "[invalid]"}] * 2, new_tokens=3, filter_list=filters)
    (cell,) = run_harness(_titans(), BYTES, ["say"], include_path=tmp_path)
    assert (cell["value"], cell["values"], cell["count"]) == (1.0, [1.0, 1.0], 2)


def test_a_metric_of_lm_eval_keeps_its_name_and_its_direction(tmp_path: Path) -> None:
    metrics = [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}]
    more = {"output_type": "loglikelihood", "metric_list": metrics, "generation_kwargs": None}
    rows = [{"prompt": "She fed the", "answer": " cat"}, {"prompt": "He fed a", "answer": " dog"}]
    _generation(tmp_path, rows, new_tokens=3, **more)
    model = _titans()
    (cell,) = run_harness(model, BYTES, ["say"], include_path=tmp_path)
    assert (cell["metric"], cell["better"]) == ("perplexity", "lower")
    likelihoods = log_likelihoods(model, BYTES, [(row["prompt"], row["answer"]) for row in rows])
    assert cell["value"] == pytest.approx(math.exp(-sum(likelihoods) / 2), rel=1e-4)
    assert cell["low"] is cell["high"] is None  # no interval of a mean is one of it

    model.save_pretrained(tmp_path / "model")
    BYTES.save_pretrained(tmp_path / "model")
    settings = {"include_path": str(tmp_path)}
    for _ in range(2):  # the second time it is there
        result = evaluate(str(tmp_path / "model"), Evaluation(("lm-eval:say",), settings), tmp_path / "out")
        entry = result["tasks"]["lm-eval:say"]
        assert (entry["metric"], entry["better"], entry["counted"]) == ("perplexity", "lower", "examples")


def test_a_text_that_is_too_long_for_a_model_is_refused(
    tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = r"^a text has \d+ tokens; expected at most 32, as many as the model can read$"
    with pytest.raises(ValueError, match=message):
        run_harness(_llama(32), BYTES, ["choices"], data=own)
    monkeypatch.setattr(harness, "LONGEST", 32)
    with pytest.raises(ValueError, match=message):
        run_harness(_titans(), BYTES, ["choices"], data=own)
    _generation(tmp_path, [{"prompt": "x" * 33, "answer": ""}], new_tokens=8)
    with pytest.raises(ValueError, match=r"^a text has 33 tokens; expected at most 24"):
        run_harness(_llama(32), BYTES, ["say"], include_path=tmp_path)
    _generation(tmp_path, [{"prompt": "x", "answer": ""}], new_tokens=32)
    with pytest.raises(ValueError, match=r"requested max tokens to generate \(32\)"):
        run_harness(_llama(32), BYTES, ["say"], include_path=tmp_path)


def test_a_long_text_is_read_whole_by_our_models(tmp_path: Path) -> None:
    model = _titans(variant="lmm", num_hidden_layers=1, memory_mode="chunked", memory_chunk_size=64)
    rows = [{"query": "x" * 2100, "choices": ["a"], "gold": 0}]
    _write(tmp_path / "long.jsonl", rows)
    (cell,) = run_harness(model, BYTES, ["long"], data=tmp_path)
    assert cell["count"] == 1


def test_data_that_cannot_be_fetched_are_one_sentence(monkeypatch: pytest.MonkeyPatch, own: Path) -> None:
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"^the data of piqa cannot be had from the hub, and there is no local file"):
        run_harness(_titans(), BYTES, ["piqa"], data=own)


def test_a_damaged_local_file_is_one_sentence(tmp_path: Path) -> None:
    _write(tmp_path / "piqa.jsonl", [{"a": 1}])
    with pytest.raises(ValueError, match=r"^the data of piqa cannot be read: .* which is no row of piqa$"):
        run_harness(_titans(), BYTES, ["piqa"], data=tmp_path)


def test_wrong_options_and_empty_files_are_refused(tmp_path: Path) -> None:
    for options, said in (
        ({"limit": 0}, "limit is 0; expected at least 1"),
        ({"limit": "few"}, "limit is 'few'; expected a whole number"),
        ({"batch_size": "auto"}, "batch_size is 'auto'; expected a whole number"),
        ({"num_fewshot": -1}, "num_fewshot is -1; expected at least 0"),
        ({"data": 5}, "data is 5; expected the name of a folder"),
        ({"include_path": 5}, "include_path is 5; expected the name of a folder"),
    ):
        with pytest.raises(ValueError, match=f"^{said}$"):
            LmEval("piqa", **options)
    (tmp_path / "hellaswag.txt").write_text("")
    with pytest.raises(ValueError, match=r"hellaswag\.txt is empty; expected"):
        local_tasks(tmp_path)
    with pytest.raises(ValueError, match="is not a folder; expected one with the data of tasks"):
        local_tasks(tmp_path / "nothing")


@pytest.mark.slow
def test_an_unknown_task_is_named(own: Path) -> None:
    with pytest.raises(ValueError, match=r"^task is 'piqqa': did you mean piqa\?$"):
        run_harness(_titans(), BYTES, ["piqqa"], data=own)


def _run(folder: Path, command: str, model: TitansForCausalLM, tasks: Path) -> dict[str, Any]:
    """What a command of lm-eval's form reports of a saved model."""
    model.save_pretrained(folder / "model")
    BYTES.save_pretrained(folder / "model")
    options = ["--model", "hf", "--model_args", f"pretrained={folder / 'model'}", "--device", "cpu"]
    options += ["--tasks", str(tasks), "--output_path", str(folder / "out")]
    run = subprocess.run([sys.executable, "-m", command, *options], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (path,) = (folder / "out").rglob("results_*.json")
    found: dict[str, Any] = json.loads(path.read_text())["results"]
    return found


def _write_tasks(folder: Path, out: Path) -> None:
    """The tasks of local files for the command ``lm_eval``, which learns of our classes with a function of ours."""
    out.mkdir(exist_ok=True)
    for name, fields in definitions(folder).items():
        lines = [f"{field}: {json.dumps(value)}" for field, value in fields.items()]
        lines.append("custom_dataset: !function titans.evaluation.harness.local_dataset")
        (out / f"{name}.yaml").write_text("\n".join([*lines, ""]))


@pytest.mark.slow
def test_the_command_lm_eval_knows_our_models_and_gives_the_same(tmp_path: Path, own: Path, paper: Path) -> None:
    model = _titans()
    for folder in (own, paper):
        _write_tasks(folder, tmp_path / "tasks")
    found = _run(tmp_path, "lm_eval", model, tmp_path / "tasks")
    cells = run_harness(model, BYTES, list(TASKS), data=paper)
    cells += run_harness(model, BYTES, ["choices", "schema"], data=own)
    assert set(found) == {cell["group"]["task"] for cell in cells}
    for cell in cells:
        for metric, value in cell["metrics"].items():
            assert found[cell["group"]["task"]][f"{metric},none"] == pytest.approx(value, rel=1e-5)


@pytest.mark.slow
def test_our_command_knows_our_models_whatever_the_task(tmp_path: Path) -> None:
    _generation(tmp_path, [{"prompt": "a", "answer": "never"}], new_tokens=3)
    found = _run(tmp_path, "titans.evaluation.harness", _titans(), tmp_path / "say.yaml")
    assert found["say"]["exact_match,none"] == 0
