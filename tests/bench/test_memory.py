import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from titans.bench import memory as memory_benchmark
from titans.bench.memory import (
    BOTH,
    CONTENDERS,
    FORWARD,
    BenchmarkSettings,
    Contender,
    Subject,
    choose_contenders,
    chunked_flops,
    measure_peak_memory,
    print_report,
    projection_flops,
    run_memory_benchmark,
    run_pass,
    write_plot,
)
from titans.bench.timing import write_json

TINY = BenchmarkSettings(
    dim=16, heads=2, chunk_size=8, lengths=(16, 24, 40), repeats=3, memory=False, gemm_size=16,
    recurrent_max_length=24, reference_max_length=24, only=("chunked", "exact", "recurrent", "chunked-op"),
)  # fmt: skip


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return run_memory_benchmark(TINY)


def test_flops_of_one_square_chunk_are_the_documented_sixteen_units() -> None:
    # keys 2 + 1, updates 2 x 2, reads 2 x (2 + 1 + 1), coefficients 1, in units of 2 b d^2 with b = d.
    assert chunked_flops(batch=1, heads=1, time=64, widths=(64,) * 3, chunk_size=64) == 16 * 2 * 64**3


def test_flops_without_momentum_need_neither_the_second_carry_nor_the_coefficients() -> None:
    count = chunked_flops(batch=1, heads=1, time=64, widths=(64,) * 3, chunk_size=64, momentum=False)
    assert count == (3 + 2 + 6) * 2 * 64**3


def test_flops_are_parametric_in_widths_and_count_the_last_chunk_by_its_tokens() -> None:
    def by_hand(b: int) -> int:
        first = 2 * b * 3 * 5 * (1 + 2 + 2) + 2 * b * b * (3 + 5)
        second = 2 * b * 5 * 2 * (2 + 2 + 2) + 2 * b * b * (5 + 2)
        return first + second + 2 * b**3

    count = chunked_flops(batch=2, heads=3, time=21, widths=(3, 5, 2), chunk_size=8)
    assert count == 2 * 3 * (2 * by_hand(8) + by_hand(5))


def test_flops_agree_with_the_products_that_the_op_really_does(only_pytorch: None) -> None:
    settings = BenchmarkSettings(dim=64, heads=2, chunk_size=16)
    subject = CONTENDERS["chunked-op"].build(settings)
    with FlopCounterMode(display=False) as counter:
        run_pass(subject, subject.make_inputs(64), FORWARD)
    needed = chunked_flops(batch=1, heads=2, time=64, widths=settings.widths, chunk_size=16)
    assert 0.9 < counter.get_total_flops() / needed < 1.1


def test_flops_of_the_module_agree_with_its_products(only_pytorch: None) -> None:
    settings = BenchmarkSettings(dim=64, heads=2, chunk_size=16)
    subject = CONTENDERS["chunked"].build(settings)
    assert subject.module is not None
    with FlopCounterMode(display=False) as counter:
        run_pass(subject, subject.make_inputs(64), FORWARD)
    needed = chunked_flops(
        batch=1, heads=2, time=64, widths=settings.widths, chunk_size=16, bounded=True
    ) + projection_flops(subject.module, batch=1, time=64)
    assert 0.9 < counter.get_total_flops() / needed < 1.1


def test_projection_flops_count_every_weight_once_a_token() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6)
            self.conv = nn.Parameter(torch.zeros(4, 6))

    assert projection_flops(Part(), batch=2, time=10) == 2 * 10 * (2 * 4 * 6 + 2 * 4 * 6)


def test_peak_memory_is_measured_in_a_fresh_process() -> None:
    answer = measure_peak_memory(TINY, "chunked-op", 512, BOTH)
    assert answer["bytes"] > 512 * 16 * 4


def test_a_process_that_fails_is_an_answer_and_not_a_crash() -> None:
    assert measure_peak_memory(TINY, "no-such-contender", 16, FORWARD) == {"error": "KeyError: 'no-such-contender'"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 0}, "dim must be at least 1, got 0"),
        ({"heads": 3}, "dim must be divisible by heads, got dim 256 and heads 3"),
        ({"depth": -1}, "depth must be at least 1"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"lengths": ()}, "lengths must name at least one"),
        ({"lengths": (64, 0)}, "lengths must be at least 1, got 0"),
        ({"lengths": (64, 64)}, "lengths must differ"),
        ({"only": ("chunky",)}, "only must name contenders among chunked, exact, .* got chunky"),
    ],
)
def test_a_wrong_setting_is_named_in_one_sentence(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BenchmarkSettings(**change)


def test_without_titans_pytorch_our_part_runs_and_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_benchmark, "reference_version", lambda: None)
    chosen, notices = choose_contenders(BenchmarkSettings())
    assert [c.name for c in chosen] == ["chunked", "exact", "recurrent", "chunked-op"]
    assert len(notices) == 1
    assert "titans-pytorch is not installed" in notices[0]


def test_asking_only_for_what_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_benchmark, "reference_version", lambda: None)
    with pytest.raises(ValueError, match="needs titans-pytorch"):
        choose_contenders(BenchmarkSettings(only=("titans-pytorch",)))


def test_another_version_of_titans_pytorch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_benchmark, "reference_version", lambda: "9.9")
    assert "titans-pytorch is at 9.9" in choose_contenders(BenchmarkSettings())[1][0]


def test_lengths_that_leave_nobody_to_run_are_an_error() -> None:
    with pytest.raises(ValueError, match="leave no contender"):
        choose_contenders(BenchmarkSettings(only=("recurrent",), lengths=(4096,)))


def test_the_report_is_plain_json_and_has_every_field(report: dict[str, Any]) -> None:
    assert json.loads(json.dumps(report, allow_nan=False))["schema"] == memory_benchmark.SCHEMA
    assert set(report) == {
        "benchmark", "schema", "machine", "versions", "settings", "contenders", "gemm", "results", "ratios",
        "scaling", "notices",
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
    def build(settings: BenchmarkSettings) -> Subject:
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
        "settings": report["settings"] | {"memory": True},
        "results": results,
        "ratios": [
            {"contender": r["contender"], "against": against, "length": r["length"], "pass": r["pass"],
             "speed": 123.4, "memory": 0.0123}
            for r in results for against in ("titans-pytorch", "titans-pytorch-coarse")
        ],
        "scaling": memory_benchmark._scaling(results, batch=1),
    }  # fmt: skip


def test_the_tables_fit_eighty_columns_and_cut_nothing(report: dict[str, Any]) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    print_report(_long_report(report), console)
    text = console.export_text()
    assert "…" not in text
    for words in (*CONTENDERS, "123x / 123x", "0.01x / 0.01x", "12345 ", "more"):
        assert words in text


def test_json_and_plot_are_written(report: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_json(report, tmp_path / "new" / "memory.json")
    write_plot(report, tmp_path / "new" / "memory.png")
    assert json.loads((tmp_path / "new" / "memory.json").read_text()) == json.loads(json.dumps(report))
    assert (tmp_path / "new" / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["memory.json", "memory.png"]
