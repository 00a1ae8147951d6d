import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from titans.bench import memory as memory_benchmark
from titans.bench.memory import (
    BOTH,
    CONTENDERS,
    FORWARD,
    Contender,
    Subject,
    choose_contenders,
    figures,
    measure_peak_memory,
    run_memory_benchmark,
    sections,
)
from titans.bench.settings import MemoryBenchmarkSettings

TINY = MemoryBenchmarkSettings(
    dim=16, heads=2, chunk_size=8, lengths=(16, 24, 40), repeats=3, peak_memory=False, gemm_size=16,
    recurrent_max_length=24, reference_max_length=24, only=("chunked", "exact", "recurrent", "chunked-op"),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def nothing_to_collect() -> Iterator[None]:
    """Between rounds there is no garbage of other tests to collect, which takes longer than a round."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gc.collect", lambda: 0)
        yield


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return run_memory_benchmark(TINY)


def test_peak_memory_is_measured_in_a_fresh_process() -> None:
    answer = measure_peak_memory(TINY, "chunked-op", 512, BOTH)
    assert answer["bytes"] > 512 * 16 * 4


def test_a_process_that_fails_is_an_answer_and_not_a_crash() -> None:
    assert measure_peak_memory(TINY, "no-such-contender", 16, FORWARD) == {"error": "KeyError: 'no-such-contender'"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 0}, "dim is 0; expected at least 1"),
        ({"heads": 3}, "dim is 256 and heads is 3; expected heads to divide dim"),
        ({"depth": -1}, "depth is -1; expected at least 1"),
        ({"repeats": 0}, "repeats is 0; expected at least 1"),
        ({"threads": 0}, "threads is 0; expected at least 1"),
        ({"lengths": ()}, "lengths is empty; expected at least one"),
        ({"lengths": (64, 0)}, "lengths has 0; expected at least 1"),
        ({"lengths": (64, 64)}, "lengths is 64, 64; expected each number once"),
        ({"only": ("chunky",)}, r"only has 'chunky': did you mean chunked\?"),
    ],
)
def test_a_wrong_setting_is_named_in_one_sentence(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MemoryBenchmarkSettings(**change)


def test_without_titans_pytorch_our_part_runs_and_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_benchmark, "reference_version", lambda: None)
    chosen, notices = choose_contenders(MemoryBenchmarkSettings())
    assert [c.name for c in chosen] == ["chunked", "exact", "recurrent", "chunked-op"]
    assert len(notices) == 1
    assert "titans-pytorch is not installed" in notices[0]


def test_asking_only_for_what_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_benchmark, "reference_version", lambda: None)
    with pytest.raises(ValueError, match="needs titans-pytorch"):
        choose_contenders(MemoryBenchmarkSettings(only=("titans-pytorch",)))


def test_another_version_of_titans_pytorch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_benchmark, "reference_version", lambda: "9.9")
    assert "titans-pytorch is at 9.9" in choose_contenders(MemoryBenchmarkSettings())[1][0]


def test_lengths_that_leave_no_contender_are_an_error() -> None:
    with pytest.raises(ValueError, match="lengths is 4096; expected one within the maximum of a chosen contender"):
        choose_contenders(MemoryBenchmarkSettings(only=("recurrent",), lengths=(4096,)))


def test_the_report_is_plain_json_and_has_every_field(report: dict[str, Any]) -> None:
    assert json.loads(json.dumps(report, allow_nan=False))["name"] == "memory"
    assert set(report) == {
        "name", "date", "version", "machine", "reference_version", "settings", "contenders", "gemm", "results",
        "ratios", "scaling", "notices",
    }  # fmt: skip
    assert {"cpu", "threads", "torch", "python", "load_average_at_start"} <= set(report["machine"])
    assert report["gemm"]["flops_per_second"] > 0
    for result in report["results"]:
        assert set(result) == {
            "contender", "length", "pass", "seconds", "best_seconds", "median_seconds", "tokens_per_second",
            "peak_growth_bytes", "peak_method", "needed_flops", "fraction_of_gemm",
        }  # fmt: skip
        assert result["best_seconds"] == min(result["seconds"])
        assert result["tokens_per_second"] == pytest.approx(result["length"] / result["best_seconds"])
    for contender in report["contenders"]:
        assert contender["rule"]
        assert contender["parameters"] > 0


def test_every_contender_has_figures_at_its_lengths_and_nowhere_else(report: dict[str, Any]) -> None:
    ran = {(r["contender"], r["length"]): len(r["seconds"]) for r in report["results"]}
    whole = {(name, length): 3 for name in ("chunked", "exact", "chunked-op") for length in (16, 24, 40)}
    assert ran == whole | {("recurrent", 16): 2, ("recurrent", 24): 2}


def test_efficiency_is_given_for_the_op_and_the_module(report: dict[str, Any]) -> None:
    counted = {r["contender"]: r for r in report["results"] if r["needed_flops"] is not None and r["length"] == 40}
    assert set(counted) == {"chunked", "chunked-op"}
    assert counted["chunked"]["needed_flops"] > counted["chunked-op"]["needed_flops"]
    for result in counted.values():
        rate = result["needed_flops"] / result["best_seconds"]
        assert result["fraction_of_gemm"] == pytest.approx(rate / report["gemm"]["flops_per_second"])


def test_progress_counts_up_to_its_total() -> None:
    seen: list[tuple[int, int]] = []
    settings = dataclasses.replace(TINY, only=("chunked-op", "recurrent"), lengths=(16, 40))
    run_memory_benchmark(settings, lambda done, total, what: seen.append((done, total)))
    assert [done for done, _ in seen] == list(range(len(seen)))
    assert seen[-1] == (len(seen) - 1, seen[0][1])


def test_the_number_of_threads_is_put_back() -> None:
    before = torch.get_num_threads()
    run_memory_benchmark(dataclasses.replace(TINY, only=("chunked-op",), lengths=(16,), threads=before + 1))
    assert torch.get_num_threads() == before


def test_titans_pytorch_runs_beside_ours_and_gives_ratios() -> None:
    pytest.importorskip("titans_pytorch")
    names = ("chunked", "titans-pytorch", "titans-pytorch-coarse")
    report = run_memory_benchmark(dataclasses.replace(TINY, only=names, lengths=(16, 40), repeats=1))
    seconds = {(r["contender"], r["length"], r["pass"]): r["best_seconds"] for r in report["results"]}
    assert ("titans-pytorch", 40, FORWARD) not in seconds
    ratios = {(r["against"], r["length"], r["pass"]): r["speed"] for r in report["ratios"]}
    assert set(ratios) == {(name, 16, which) for name in names[1:] for which in (FORWARD, BOTH)}
    for (against, length, which), speed in ratios.items():
        assert speed == seconds[against, length, which] / seconds["chunked", length, which]
    assert all(c["notes"] for c in report["contenders"] if c["package"] == "titans-pytorch")


def test_a_contender_that_gives_nan_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(settings: MemoryBenchmarkSettings) -> Subject:
        return Subject(lambda n: (torch.ones(n, requires_grad=True),), lambda x: x * float("nan"))

    monkeypatch.setitem(CONTENDERS, "exact", Contender("exact", "titan-memory", "broken", build))
    report = run_memory_benchmark(dataclasses.replace(TINY, only=("exact", "chunked-op"), lengths=(16,)))
    assert {r["contender"] for r in report["results"]} == {"chunked-op"}
    assert any("exact failed at 16 tokens, forward: the output is not finite" in n for n in report["notices"])


def _results(peaks: list[int], lengths: tuple[int, ...] = (512, 2048, 8192)) -> list[dict[str, Any]]:
    return [
        {"contender": "chunked", "pass": BOTH, "length": n, "tokens_per_second": n / 2, "peak_growth_bytes": p}
        for n, p in zip(lengths, peaks, strict=True)
    ]


@pytest.mark.parametrize(
    ("peaks", "slope", "growth"),
    [
        ([512_000, 2_048_000, 8_192_000], 1000, "linear"),
        ([512_000, 2_048_000, 3_584_000], 250, "sublinear"),
        ([512_000, 2_048_000, 20_480_000], 3000, "superlinear"),
    ],
)
def test_memory_growth_compares_the_last_two_slopes(peaks: list[int], slope: float, growth: str) -> None:
    (row,) = memory_benchmark._scaling(_results(peaks), batch=1)
    assert row["bytes_per_token"] == slope
    assert row["memory_growth"] == growth
    assert (row["from_length"], row["to_length"], row["speed_retained"]) == (2048, 8192, 4.0)


def test_two_lengths_are_too_few_to_speak_of_growth() -> None:
    (row,) = memory_benchmark._scaling(_results([1000, 2000], (512, 2048)), batch=1)
    assert row["memory_growth"] is None


def _long_report(report: dict[str, Any]) -> dict[str, Any]:
    """The report as it would be with every contender, long lengths and large figures."""
    results = [
        {
            "contender": name, "length": length, "pass": which, "seconds": [83.21], "best_seconds": 83.21,
            "median_seconds": 183.2, "tokens_per_second": 123456.7, "peak_growth_bytes": peak * 2**20,
            "peak_method": "VmHWM", "needed_flops": 10**12, "fraction_of_gemm": 0.123,
        }
        for length, peak in ((512, 100), (8192, 1000), (32768, 12345))
        for name in CONTENDERS for which in (FORWARD, BOTH)
    ]  # fmt: skip
    return report | {
        "settings": report["settings"] | {"peak_memory": True, "lengths": [512, 8192, 32768]},
        "contenders": [report["contenders"][0] | {"name": name} for name in CONTENDERS],
        "results": results,
        "ratios": [
            {"contender": r["contender"], "against": against, "length": r["length"], "pass": r["pass"],
             "speed": 123.4, "memory": 0.0123}
            for r in results for against in ("titans-pytorch", "titans-pytorch-coarse")
        ],
        "scaling": memory_benchmark._scaling(results, batch=1),
    }  # fmt: skip


def test_the_page_has_times_memory_and_scaling_of_every_contender(report: dict[str, Any]) -> None:
    long = _long_report(report)
    speed, memory, scaling, about = sections(long)
    for table in (*speed.tables, memory.tables[0], scaling.tables[0]):
        assert {row[0] for row in table.rows} == set(CONTENDERS)
        assert all(len(row) == len(table.header) for row in table.rows)
    assert speed.tables[0].rows[0] == ["chunked", "512", "83,210", "183,200", "123,457", "123x / 123x"]
    assert memory.tables[0].rows[-1][-2:] == ["12345", "0.01x / 0.01x"]
    assert scaling.tables[0].rows[0][1:] == ["forward", "12.3%", "1.00x of 512", "472.7", "superlinear"]
    assert [row[0] for row in about.tables[1].rows] == list(CONTENDERS)
    assert [figure.name for figure in figures(long)[speed.title]] == ["memory-forward", "memory-forward-backward"]


def test_without_peak_memory_the_page_has_no_table_of_it(report: dict[str, Any]) -> None:
    assert [part.title for part in sections(report)] == ["Speed", "At the longest length", "Settings"]
