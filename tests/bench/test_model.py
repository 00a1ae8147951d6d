import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from titans.bench import model as model_benchmark
from titans.bench.model import (
    BASELINE,
    COMPILE,
    CONTENDERS,
    DECODE,
    OURS,
    PREFILL,
    REFERENCE_MAC,
    TRAIN,
    Contender,
    Subject,
    choose_contenders,
    decode,
    figures,
    find_crossings,
    make_ids,
    probe,
    reach,
    run_model_benchmark,
    sections,
    target_parameters,
    train_step,
)
from titans.bench.settings import ModelBenchmarkSettings

TINY = ModelBenchmarkSettings(
    dim=32, layers=2, heads=2, vocab_size=32, segment=8, window=16, persistent=2, lengths=(16, 20),
    decode_positions=(9, 40), decode_tokens=2, repeats=2, peak_memory=False, only=("mac", BASELINE),
)  # fmt: skip
QUICK = dataclasses.replace(TINY, parameters=1)  # for models that are not fitted
INSTALLED = [
    pytest.param(name, marks=pytest.mark.skipif(model_benchmark.reference_version() is None, reason="not installed"))
    if name == REFERENCE_MAC
    else name
    for name in CONTENDERS
]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return run_model_benchmark(TINY)


@pytest.mark.slow
def test_training_through_compile_is_timed_beside_training() -> None:
    settings = dataclasses.replace(QUICK, only=("lmm",), layers=1, lengths=(16,), measures=(TRAIN, COMPILE))
    report = run_model_benchmark(settings)
    eager, compiled = report["results"]
    assert (eager["graph_breaks"], compiled["graph_breaks"]) == (None, 0)
    assert compiled["measure"] == COMPILE and compiled["tokens_per_second"] > 0
    (table,) = next(section for section in sections(report) if section.title == "Training, compiled").tables
    assert table.header[4:6] == ["/eager", "breaks"] and table.rows[0][5] == "0"


class Echo(nn.Module):
    """A model that is quick: the logits of a token are its embedding."""

    def __init__(self, settings: ModelBenchmarkSettings) -> None:
        super().__init__()
        self.table = nn.Embedding(settings.vocab_size, settings.vocab_size)
        self.calls: list[int] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.calls.append(ids.shape[1])
        y: Tensor = self.table(ids)
        return y

    def read(self, ids: Tensor, cache: int | None) -> tuple[Tensor, int]:
        return self(ids)[:, -1:], (cache or 0) + ids.shape[1]


def echo(settings: ModelBenchmarkSettings, scale: float = 1.0, whole_prompt: bool = False) -> Subject:
    model = Echo(settings)
    return Subject(model, 1, lambda ids: scale * model(ids), model.read, whole_prompt)


def replace_models(monkeypatch: pytest.MonkeyPatch, **builds: Any) -> None:
    """Puts quick models in the place of contenders; they leave nothing behind to collect."""
    monkeypatch.setattr("gc.collect", lambda: 0)
    for name, build in builds.items():
        package = "titans-pytorch" if name == REFERENCE_MAC else "titan-memory"
        monkeypatch.setitem(CONTENDERS, name, Contender(name, package, "quick", build))


@pytest.mark.parametrize("name", INSTALLED)
def test_every_contender_trains_and_decodes_and_has_about_the_same_parameters(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dataclasses.replace(TINY, dim=64, parameters=200_000)
    subject = CONTENDERS[name].build(settings)
    assert subject.parameters == pytest.approx(200_000, rel=0.03)
    ids = make_ids(settings, 27)
    assert train_step(subject, ids) == pytest.approx(math.log(settings.vocab_size), rel=0.3)
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in subject.model.parameters())
    at_once = reach(subject, ids)
    monkeypatch.setattr(model_benchmark, "PIECE", 10)
    assert torch.allclose(reach(subject, ids)[0], at_once[0], atol=1e-5)
    logits, _ = decode(subject, *at_once, tokens=2)
    assert logits.shape == (1, 1, settings.vocab_size)
    assert logits.isfinite().all()


def test_the_parameters_are_those_of_mac_or_can_be_chosen() -> None:
    assert target_parameters(dataclasses.replace(TINY, parameters=123)) == 123
    assert target_parameters(TINY) == CONTENDERS["mac"].build(TINY).parameters


def test_the_memory_options_reach_the_models() -> None:
    settings = dataclasses.replace(TINY, memory_mode="chunked", memory_depth=1, chunk_size=4)
    config: Any = CONTENDERS["mal"].build(settings).model.config
    assert (config.memory_mode, config.memory_depth, config.memory_chunk_size) == ("chunked", 1, 4)
    assert (config.window_size, config.num_persistent_tokens, config.num_hidden_layers) == (16, 2, 2)
    assert CONTENDERS["mal"].rule(settings) == (
        "one step per token, gradient at the start of the token's chunk of 4, every token reads after its own write"
    )
    assert "sequential rule" in str(CONTENDERS["mac"].rule(TINY))
    assert "one step per 16 tokens" in str(CONTENDERS[REFERENCE_MAC].rule(TINY))


def test_the_report_is_plain_json_and_has_every_figure(report: dict[str, Any]) -> None:
    assert json.loads(json.dumps(report, allow_nan=False))["name"] == "model"
    assert set(report) == {
        "name", "date", "version", "machine", "versions", "settings", "target_parameters", "max_memory_bytes",
        "contenders", "results", "ratios", "crossings", "decoding", "left_out", "notices",
    }  # fmt: skip
    places = [(r["measure"], r["length"], r["contender"]) for r in report["results"]]
    assert places == [
        (measure, length, name)
        for measure in TINY.measures for length in TINY.lengths_of(measure) for name in ("mac", BASELINE)
    ]  # fmt: skip
    for result in report["results"]:
        assert len(result["seconds"]) == TINY.repeats
        tokens = TINY.decode_tokens if result["measure"] == DECODE else result["length"]
        assert result["tokens_per_second"] == pytest.approx(tokens / result["best_seconds"])
    ours, baseline = report["contenders"]
    assert (ours["tokens_per_step"], baseline["tokens_per_step"]) == (1, None)
    assert ours["engine"].startswith(("native (", "dual (")) and baseline["engine"] is None
    assert ours["rule"] and baseline["rule"] is None
    assert ours["parameters"] == pytest.approx(baseline["parameters"], rel=0.05)


def test_ratios_and_what_decoding_keeps_follow_from_the_figures(report: dict[str, Any]) -> None:
    best = {(r["contender"], r["measure"], r["length"]): r["best_seconds"] for r in report["results"]}
    assert len(report["ratios"]) == len(best) / 2
    for r in report["ratios"]:
        measure, length = r["measure"], r["length"]
        assert r["speed"] == best[BASELINE, measure, length] / best["mac", measure, length]
        assert r["rule"] == report["contenders"][0]["rule"]
    for r in report["decoding"]:
        assert (r["from_position"], r["to_position"]) == (9, 40)
        assert r["speed_kept"] == pytest.approx(best[r["contender"], DECODE, 9] / best[r["contender"], DECODE, 40])


def test_progress_counts_up_to_its_total(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_models(monkeypatch, mac=echo, mag=echo)
    seen: list[tuple[int, int]] = []
    run_model_benchmark(
        dataclasses.replace(QUICK, only=("mac", "mag")), lambda done, total, what: seen.append((done, total))
    )
    assert [done for done, _ in seen] == list(range(len(seen)))
    assert seen[-1] == (len(seen) - 1, seen[0][1])


def test_every_round_runs_every_contender_and_starts_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_models(monkeypatch, lmm=echo, mac=echo, mag=echo)
    seen: list[str] = []
    settings = dataclasses.replace(QUICK, only=("lmm", "mac", "mag"), lengths=(16,), measures=(TRAIN,), repeats=3)
    run_model_benchmark(settings, lambda done, total, what: seen.append(what.split()[2][:-1]) if done < total else None)
    assert seen == ["lmm", "mac", "mag", "mac", "mag", "lmm", "mag", "lmm", "mac"]


def test_a_length_that_would_take_too_long_is_left_out_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_models(monkeypatch, mac=echo, mag=echo)
    monkeypatch.setattr(
        model_benchmark, "_time_call", lambda subject, measure, ids: ids.shape[1] * (1.0 if measure == TRAIN else 0.1)
    )
    settings = dataclasses.replace(
        QUICK, only=("mac",), measures=(TRAIN, PREFILL), lengths=(10, 20, 40, 80), max_seconds=30
    )
    found = run_model_benchmark(settings)
    ran = [(r["measure"], r["length"]) for r in found["results"]]
    assert ran == [(TRAIN, 10), (TRAIN, 20), *((PREFILL, length) for length in settings.lengths)]
    assert found["left_out"] == [{"contender": "mac", "measure": TRAIN, "from_length": 40}]
    words = "judging by 20 tokens it would take at least 40 s, more than 30 s (max_seconds)"
    assert any(words in notice for notice in found["notices"])


def test_a_first_round_that_took_too_long_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_models(monkeypatch, mac=echo)
    monkeypatch.setattr(model_benchmark, "_time_call", lambda subject, measure, ids: 50.0)
    settings = dataclasses.replace(QUICK, only=("mac",), measures=(TRAIN,), max_seconds=30)
    found = run_model_benchmark(settings)
    assert [(r["length"], r["seconds"]) for r in found["results"]] == [(16, [50.0])]


def test_the_way_to_a_position_is_given_up_after_max_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_benchmark, "PIECE", 4)
    subject = echo(QUICK)
    with pytest.raises(TimeoutError, match="reading up to there takes more than 0 s"):
        reach(subject, make_ids(QUICK, 40), max_seconds=0)
    replace_models(monkeypatch, mac=echo)
    found = run_model_benchmark(dataclasses.replace(QUICK, only=("mac",), measures=(DECODE,), max_seconds=1e-9))
    assert found["results"] == []
    assert any("decode, is not measured at position 9 and beyond" in notice for notice in found["notices"])


def test_a_model_that_reads_prompts_only_whole_gets_them_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_benchmark, "PIECE", 16)
    for whole, calls in ((True, [40]), (False, [16, 16, 8])):
        subject = echo(QUICK, whole_prompt=whole)
        _, cache = reach(subject, make_ids(QUICK, 40))
        assert subject.model.calls == calls
        assert decode(subject, torch.zeros(1, 1, 32), cache, tokens=3)[1] == 43


def test_a_contender_that_gives_nan_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_models(monkeypatch, mac=lambda settings: echo(settings, float("nan")), mag=echo)
    found = run_model_benchmark(dataclasses.replace(QUICK, only=("mac", "mag"), measures=(TRAIN,)))
    assert {r["contender"] for r in found["results"]} == {"mag"}
    assert any("mac, train, is not measured at 16 tokens" in notice for notice in found["notices"])


@pytest.mark.slow
def test_peak_memory_of_decoding_counts_the_cache() -> None:
    settings = dataclasses.replace(QUICK, dim=128)
    answer = probe(settings, BASELINE, DECODE, 4096)
    cache = 2 * 2 * 4096 * 128 * 4  # keys and values, layers, tokens, width, bytes
    assert cache < answer["bytes"] < 3 * cache


@pytest.mark.slow
def test_what_needs_more_than_max_memory_is_an_answer_and_not_a_crash() -> None:
    assert probe(QUICK, BASELINE, TRAIN, 20_000, max_memory=2**20) == {
        "error": "it needs more than 0.00098 GiB (max_memory)"
    }


def test_a_failed_probe_leaves_the_contender_out_from_there_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(settings: Any, name: str, measure: str, length: int, max_memory: int | None) -> dict[str, Any]:
        return {"error": "it is too large"} if length > 16 else {"bytes": 5, "method": "VmHWM", "seconds": 0.1}

    replace_models(monkeypatch, mac=echo)
    monkeypatch.setattr(model_benchmark, "probe", no_room)
    settings = dataclasses.replace(QUICK, only=("mac",), measures=(TRAIN,), lengths=(16, 20, 24), peak_memory=True)
    found = run_model_benchmark(settings)
    assert [(r["length"], r["peak_growth_bytes"]) for r in found["results"]] == [(16, 5)]
    assert sum("it is too large" in notice for notice in found["notices"]) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 0}, "dim is 0; expected at least 1"),
        ({"heads": 3}, "dim is 256 and heads is 3; expected heads to divide dim into even widths"),
        ({"heads": 256}, "even widths"),
        ({"window": 0}, "window is 0; expected at least 1"),
        ({"segment": 0}, "segment is 0; expected at least 1"),
        ({"persistent": -1}, "persistent is -1; expected at least 0"),
        ({"chunk_size": 0}, "chunk_size is 0; expected at least 1"),
        ({"parameters": 0}, "parameters is 0; expected at least 1"),
        ({"repeats": 0}, "repeats is 0; expected at least 1"),
        ({"lengths": ()}, "lengths is empty; expected at least one"),
        ({"lengths": (1, 64)}, "lengths has 1; expected at least 2"),
        ({"decode_positions": (0,)}, "decode_positions has 0; expected at least 1"),
        ({"memory_mode": "quick"}, "memory_mode is 'quick': expected one of chunked, exact, recurrent"),
        ({"measures": ()}, "measures is empty; expected some of train, prefill, decode, compile"),
        ({"measures": ("sleep",)}, "measures has 'sleep': expected one of train, prefill, decode, compile"),
        ({"max_seconds": 0}, "max_seconds is 0; expected a positive number"),
        ({"max_memory": float("nan")}, "max_memory is nan; expected a positive number"),
        ({"only": ("rwkv",)}, "only has 'rwkv': expected one of lmm, mac"),
    ],
)
def test_a_wrong_setting_is_named_in_one_sentence(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelBenchmarkSettings(**change)


def test_without_titans_pytorch_the_rest_runs_and_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_benchmark, "reference_version", lambda: None)
    chosen, notices = choose_contenders(ModelBenchmarkSettings())
    assert [c.name for c in chosen] == [name for name in CONTENDERS if name != REFERENCE_MAC]
    assert "titans-pytorch is not installed" in notices[0]
    with pytest.raises(ValueError, match="needs titans-pytorch"):
        choose_contenders(ModelBenchmarkSettings(only=(REFERENCE_MAC,)))


def test_without_transformers_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"the models need transformers: pip install 'titan-memory\[models\]'"):
        choose_contenders(TINY)


def _speeds(ours: dict[int, float], baseline: dict[int, float]) -> list[dict[str, Any]]:
    return [
        {"contender": name, "measure": TRAIN, "length": length, "tokens_per_second": speed}
        for name, speeds in (("mac", ours), (BASELINE, baseline))
        for length, speed in speeds.items()
    ]


def test_the_crossing_lies_on_the_line_between_two_lengths() -> None:
    # twice as slow at 1,000, twice as fast at 4,000: equal in the middle of the logarithms
    (found,) = find_crossings(_speeds({1000: 50, 4000: 50}, {1000: 100, 4000: 25}))
    assert found["length"] == pytest.approx(2000)
    assert found["text"] == "from about 2,000 tokens on (between 1,000 and 4,000)"


@pytest.mark.parametrize(
    ("ours", "baseline", "length", "words"),
    [
        ({64: 9, 128: 9}, {64: 10, 128: 10}, None, "not up to 128 tokens"),
        ({64: 11, 128: 9}, {64: 10, 128: 10}, None, "not up to 128 tokens"),
        ({64: 9, 128: 9, 256: 99}, {64: 10, 128: 10}, None, "not up to 128 tokens"),
        ({64: 11, 128: 11}, {64: 10, 128: 10}, 64, "at every length measured, from 64 tokens on"),
        ({64: 11, 128: 5, 256: 20}, {64: 10, 128: 10, 256: 10}, 128 * 2**0.5, "between 128 and 256"),
    ],
)
def test_faster_means_faster_from_there_on(
    ours: dict[int, float], baseline: dict[int, float], length: float | None, words: str
) -> None:
    (found,) = find_crossings(_speeds(ours, baseline))
    assert found["length"] == (None if length is None else pytest.approx(length))
    assert words in found["text"]


def test_without_the_baseline_nothing_is_said_of_crossings() -> None:
    assert find_crossings(_speeds({64: 1.0}, {})) == []


def _long_report(report: dict[str, Any]) -> dict[str, Any]:
    """The report as it would be with every contender, long lengths and large figures."""
    results = [
        {
            "contender": name, "length": length, "measure": measure, "seconds": [83.21], "best_seconds": 83.21,
            "median_seconds": 183.2, "tokens_per_second": 123456.7, "peak_growth_bytes": 12345 * 2**20,
        }
        for measure in TINY.measures for length in (512, 100_000) for name in CONTENDERS
    ]  # fmt: skip
    return report | {
        "results": results,
        "contenders": [
            report["contenders"][0] | {"name": name, "parameters": 123_456_789, "layers": 24} for name in CONTENDERS
        ],
        "ratios": [
            {"contender": r["contender"], "against": against, "measure": r["measure"], "length": r["length"],
             "speed": 123.4}
            for r in results if r["contender"] in OURS for against in (BASELINE, REFERENCE_MAC)
        ],
        "settings": report["settings"] | {"lengths": [512, 100_000], "decode_positions": [512, 100_000]},
        "decoding": model_benchmark._decoding(results),
        "crossings": find_crossings(results),
    }  # fmt: skip


def test_the_page_has_every_measure_of_every_contender(report: dict[str, Any]) -> None:
    long = _long_report(report)
    train, prefill, decoding, models, about = sections(long)
    for part in (train, prefill, decoding):
        assert [row[0] for row in part.tables[0].rows] == [*CONTENDERS, *CONTENDERS]
        assert all(len(row) == len(part.tables[0].header) for row in part.tables[0].rows)
    assert train.tables[0].rows[0] == ["lmm", "512", "123,457", "183,200", "123x", "123x", "12345"]
    assert decoding.tables[0].rows[-1][:5] == [REFERENCE_MAC, "100,000", "123,457", "41,605", "1.0x"]
    assert train.paragraphs == [
        "Faster in training than transformer++: lmm, mac, mag, mal not up to 100,000 tokens, the longest that both ran."
    ]
    assert [row[0] for row in models.tables[0].rows] == [row[0] for row in about.tables[1].rows] == list(CONTENDERS)
    assert about.tables[1].rows[0][2] == report["contenders"][0]["rule"]
    assert list(figures(long)) == [part.title for part in (train, prefill, decoding)]


def test_what_was_not_measured_has_no_part_of_the_page(report: dict[str, Any]) -> None:
    trained = report | {"results": [r for r in report["results"] if r["measure"] == TRAIN]}
    assert [part.title for part in sections(trained)] == ["Training", "Models", "Settings"]
    assert list(figures(trained)) == ["Training"]
