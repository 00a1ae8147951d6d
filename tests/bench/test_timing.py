import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from titans.bench import timing as benchmark
from titans.bench.settings import check_lengths
from titans.bench.timing import (
    about,
    answer_of,
    available_memory,
    choose_names,
    in_fresh_process,
    limit_memory,
    new_report,
    peak_growth,
    settled_bytes,
    timing,
    work_folder,
)
from titans.report.page import Table

MIB = 2**20


def test_peak_growth_sees_memory_that_is_freed_before_the_call_returns() -> None:
    growth, _ = peak_growth(lambda: torch.ones(32 * MIB // 4).sum().item())
    assert 0.9 * 32 * MIB < growth < 1.3 * 32 * MIB


def test_peak_growth_falls_back_to_sampling_where_the_system_keeps_no_peak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("psutil")

    def no_status(field: str) -> int:
        raise OSError("no such file")

    def hold() -> None:
        held = torch.ones(32 * MIB // 4)
        time.sleep(0.1)
        del held

    monkeypatch.setattr(benchmark, "_status_bytes", no_status)
    growth, method = peak_growth(hold)
    assert method == "sampled"
    assert 0.9 * 32 * MIB < growth < 1.3 * 32 * MIB


def test_peak_growth_can_count_from_an_earlier_moment() -> None:
    before = settled_bytes()
    held = torch.ones(16 * MIB // 4)
    growth, _ = peak_growth(lambda: torch.ones(16 * MIB // 4).sum().item(), before)
    assert 0.9 * 32 * MIB < growth < 1.3 * 32 * MIB
    assert held.sum() > 0


def _double(job: dict[str, Any]) -> dict[str, Any]:
    print("something else on the output")
    if job["number"] < 0:
        raise ValueError(f"number is {job['number']}; expected at least 0")
    return {"answer": 2 * job["number"]}


def _too_much(job: dict[str, Any]) -> dict[str, Any]:
    limit_memory(64 * MIB)
    torch.ones(16 * MIB // 4)
    try:
        torch.ones(256 * MIB // 4)
    except RuntimeError as error:
        return {"message": str(error)}
    return {}


def _sleep(job: dict[str, Any]) -> dict[str, Any]:
    time.sleep(60)
    return {}


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a fresh process find the workers of this file."""
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{Path(__file__).parents[2]}")
    for worker in (_double, _too_much, _sleep):
        monkeypatch.setattr(worker, "__module__", Path(__file__).stem)


@pytest.mark.usefixtures("importable")
def test_a_fresh_process_answers_a_job_whatever_else_it_prints() -> None:
    assert in_fresh_process(_double, {"number": 21}, threads=1) == {"answer": 42}


@pytest.mark.usefixtures("importable")
def test_a_fresh_process_that_takes_too_long_is_an_answer() -> None:
    assert in_fresh_process(_sleep, {}, threads=1, seconds=0.2) == {"error": "ended after 0 s"}


@pytest.mark.usefixtures("importable")
def test_an_answer_that_is_needed_is_an_error_of_one_sentence_if_it_fails() -> None:
    with pytest.raises(ValueError, match=r"^number is -1; expected at least 0$"):
        answer_of(_double, {"number": -1}, threads=1)


@pytest.mark.skipif(available_memory() is None, reason="the system does not tell")
@pytest.mark.usefixtures("importable")
def test_beyond_the_limit_an_allocation_fails_instead_of_the_machine() -> None:
    assert "can't allocate memory" in in_fresh_process(_too_much, {}, threads=1)["message"]


def test_lengths_come_back_in_order() -> None:
    assert check_lengths("lengths", [64, 8, 16]) == (8, 16, 64)


def test_contenders_of_a_missing_package_are_left_out_with_a_sentence() -> None:
    packages = {"mine": "titan-memory", "theirs": "titans-pytorch"}
    assert choose_names(packages, (), "0.5.5") == (["mine", "theirs"], [])
    names, notices = choose_names(packages, (), None)
    assert names == ["mine"]
    assert "pip install titans-pytorch==0.5.5" in notices[0]
    assert choose_names(packages, ("mine",), None) == (["mine"], [])


def test_timing_takes_the_best_round() -> None:
    found = timing([2.0, 0.5, 1.0], tokens=100)
    assert (found["best_seconds"], found["median_seconds"], found["tokens_per_second"]) == (0.5, 1.0, 200.0)


@dataclass(frozen=True)
class Settings:
    lengths: tuple[int, ...] = (512, 2048)
    only: tuple[str, ...] = ()
    parameters: int | None = None
    peak_memory: bool = True


def test_the_last_part_of_a_page_names_the_machine_the_notices_and_every_setting() -> None:
    report = new_report("memory", Settings(), threads=2)
    report["notices"] = ["exact failed."]
    part = about(report, Table(["more"], [["cells"]]))
    assert "2 threads" in part.paragraphs[0] and part.paragraphs[1:] == ["Exact failed."]
    assert part.tables[0].rows == [
        ["lengths", "512, 2,048"], ["only", "default"], ["parameters", "default"], ["peak_memory", "True"]
    ]  # fmt: skip
    assert part.tables[1].rows == [["cells"]]


def test_what_is_counted_and_not_measured_names_no_machine() -> None:
    report = new_report("flops", Settings())
    assert "machine" not in report and about(report).paragraphs == []


def test_work_goes_to_the_folder_or_is_gone_afterwards(tmp_path: Path) -> None:
    with work_folder(tmp_path) as folder:
        assert folder == tmp_path
    with work_folder(None) as folder:
        (folder / "file").write_text("")
    assert not folder.exists()
