"""DNA: read from every layout, refused in a sentence, and folded such that no near copy is tested."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titans.tasks.dna import TRAIN, make_folds, near_copies, read_dna, reverse_complement

dna = st.text("ACGTNRYSWKMBDHV", max_size=40)


def draw(count: int, length: int = 120, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices("ACGT", k=length)) for _ in range(count)]


def write_csv(
    path: Path, sequences: list[str], labels: list[str] | None = None, header: str = "sequence,label"
) -> Path:
    labels = labels or [str(index % 2) for index in range(len(sequences))]
    path.write_text("\n".join([header, *map(",".join, zip(sequences, labels, strict=True))]) + "\n")
    return path


@given(dna)
def test_the_other_strand_of_the_other_strand_is_the_sequence(sequence: str) -> None:
    assert reverse_complement(reverse_complement(sequence)) == sequence


def test_the_other_strand_is_read_backwards() -> None:
    assert reverse_complement("aacgtN") == "NACGTT"


def test_columns_may_stand_in_any_order_and_case_and_ambiguous_letters_become_n(tmp_path: Path) -> None:
    (tmp_path / "few.csv").write_text("Id,LABEL,Seq\n1,b,acgtr\n2,a,TTNNA\n3,b,CCCCC\n4,a,GATTA\n")
    (data,) = read_dna(tmp_path, folds=2)
    assert data.sequences == ("ACGTN", "TTNNA", "CCCCC", "GATTA")
    assert (data.classes, data.labels) == (("a", "b"), (1, 0, 1, 0))
    assert data.protocol == "2-fold cross-validation inside the data"


@pytest.mark.parametrize("names", [("train_x.csv", "test_x.csv"), ("x_train.csv", "x_test.csv")])
def test_a_pair_of_files_is_trained_on_the_one_and_tested_on_the_other(tmp_path: Path, names: tuple[str, str]) -> None:
    sequences = draw(10)
    write_csv(tmp_path / names[0], sequences[:6])
    write_csv(tmp_path / names[1], sequences[6:])
    (data,) = read_dna(tmp_path)
    assert (data.name, data.folds) == ("x", (TRAIN,) * 6 + (0,) * 4)
    assert data.protocol == "trained on the train split, tested on the test split"


def test_a_lonely_test_split_is_cross_validated_and_says_so(tmp_path: Path) -> None:
    write_csv(tmp_path / "test_x.csv", draw(10))
    (data,) = read_dna(tmp_path)
    assert data.protocol == "5-fold cross-validation inside the test split, the only one there is"
    assert set(data.folds) == set(range(5))


def test_the_layout_of_genomic_benchmarks_is_read_and_several_data_sets_are(tmp_path: Path) -> None:
    sequences = iter(draw(12))
    for part in ("train", "test"):
        for kind in ("negative", "positive"):
            (tmp_path / "demo" / part / kind).mkdir(parents=True)
            for number in range(2):
                (tmp_path / "demo" / part / kind / f"{number}.txt").write_text(next(sequences) + "\n")
    write_csv(tmp_path / "other.csv", draw(6, seed=1))
    demo, other = read_dna(tmp_path)
    assert demo == read_dna(tmp_path / "demo")[0]
    assert (demo.name, demo.classes, demo.folds) == ("demo", ("negative", "positive"), (TRAIN,) * 4 + (0,) * 4)
    assert demo.labels == (0, 0, 1, 1) * 2
    assert other.name == "other"


def test_sequences_and_labels_may_be_lines_of_two_files_of_the_same_length(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("\n".join(draw(6)))
    (tmp_path / "x.labels").write_text("a b a b a b")
    assert read_dna(tmp_path)[0].labels == (0, 1) * 3
    (tmp_path / "x.labels").write_text("a\nb\na\n")
    with pytest.raises(ValueError, match=r"x.labels has 3 labels and .*x.txt has 6 sequences; expected as many"):
        read_dna(tmp_path)


def test_overlapping_windows_of_either_strand_are_near_copies_and_others_are_not() -> None:
    long, *others = draw(1, 600) + draw(20, 200, seed=1)
    windows = [long[start : start + 200] for start in (0, 150, 300)]
    windows[1] = reverse_complement(windows[1])
    groups = near_copies([*windows, *others])
    assert len(set(groups[:3])) == 1
    assert len(set(groups[2:])) == 21


def test_a_sequence_that_many_have_is_one_group_and_short_ones_only_equal_themselves() -> None:
    same, short = draw(1)[0], ["ACG", "CGT", "ACC"]
    groups = near_copies([same] * 40 + short)
    assert len(set(groups[:40])) == 1
    assert groups[40] == groups[41] != groups[42]


def test_folds_keep_groups_together_and_classes_balanced() -> None:
    rng = random.Random(0)
    groups = [rng.randrange(60) for _ in range(300)]
    labels = [int(rng.random() < 0.3) for _ in groups]
    folds = make_folds(groups, labels, 5)
    assert all(len({fold for fold, each in zip(folds, groups, strict=True) if each == group}) == 1 for group in groups)
    for label in (0, 1):
        counts = [sum(f == fold and each == label for f, each in zip(folds, labels, strict=True)) for fold in range(5)]
        assert max(counts) - min(counts) <= 8
    assert folds != make_folds(groups, labels, 5, seed=1)


def test_splits_that_share_a_sequence_or_its_other_strand_are_refused_unless_it_may_be_dropped(tmp_path: Path) -> None:
    sequences = draw(10)
    write_csv(tmp_path / "train_x.csv", [*sequences[:6], reverse_complement(sequences[7])])
    write_csv(tmp_path / "test_x.csv", sequences[6:])
    with pytest.raises(ValueError, match="x has sequences in more than one of its parts, on either strand: 1 of 11;"):
        read_dna(tmp_path)
    (data,) = read_dna(tmp_path, drop_shared=True)
    assert data.sequences == tuple(sequences)


def test_given_folds_are_kept_and_refused_if_they_share_a_sequence(tmp_path: Path) -> None:
    sequences = draw(6)
    rows = [f"{sequence},{index % 2},{index // 3}" for index, sequence in enumerate(sequences)]
    file = tmp_path / "x.csv"
    file.write_text("\n".join(["sequence,label,fold", *rows]))
    (data,) = read_dna(file)
    assert (data.folds, data.protocol) == ((0, 0, 0, 1, 1, 1), "the folds that the data comes with")
    file.write_text("\n".join(["sequence,label,fold", *rows, f"{sequences[0]},0,1"]))
    with pytest.raises(ValueError, match="expected parts such as fold 0 and fold 1 that share none"):
        read_dna(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sequence,label\nACGT,0\nACZT,1\n", "line 3 has the letter 'Z' at position 3; expected A, C, G, T, N"),
        ("sequence,label\nACGT,0\n,1\n", "line 3 is an empty sequence; expected nucleotides"),
        ("sequence,label\nACGT,0\nACGT,\n", "line 3 has no label"),
        ("sequence,class name\nACGT,0\n", "has the columns sequence, class name; expected label or class"),
        ("dna,label\nACGT,0\n", "has the columns dna, label; expected sequence or seq"),
        ("sequence,label\n" + "ACGT,0\n" * 5, "x has only the class 0; expected at least two"),
        ("sequence,label\nACGT,0\nAAAA,1\n", "x has 2 sequences; expected at least 5, one for each fold"),
        ("sequence,label\n" + "ACGT,0\nACGT,1\n" * 4, "x has too few groups of near copies, 1; expected at least 5"),
        ("sequence,label\n", "has no rows; expected a sequence and a label in each"),
        ("", "has the columns none; expected sequence or seq"),
        ("sequence,label,fold\nACGT,0,first\n", "line 2 has the fold 'first'; expected a whole number from 0"),
        ("sequence,label,fold\nACGT,0,²\n", "line 2 has the fold '²'; expected a whole number from 0"),
        ("sequence,label,fold\nACGT,0,3\nAAAA,1,3\n", "x has only one part; expected at least two, such as fold 0"),
    ],
)
def test_bad_files_are_refused_in_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ValueError) as refused:
        read_dna(tmp_path / "x.csv")
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_sequence_may_be_longer_than_a_field_of_the_csv_module_usually_is(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    (data,) = read_dna(write_csv(tmp_path / "x.csv", draw(4, before + 1)), folds=2)
    assert {len(sequence) for sequence in data.sequences} == {before + 1}
    assert csv.field_size_limit() == before


@pytest.mark.parametrize("name", ["x.csv", "x.txt", "x.labels"])
def test_bytes_that_are_no_text_are_refused_with_the_name_of_their_file(tmp_path: Path, name: str) -> None:
    for each in {name, "x.txt", "x.labels"}:
        (tmp_path / each).write_bytes(b"AC\xff" if each == name else b"AC")
    with pytest.raises(ValueError, match=f"{name} is not UTF-8 from byte 2 on; expected a text in UTF-8$"):
        read_dna(tmp_path)


@pytest.mark.parametrize("folds", [0, 1])
def test_at_least_two_folds_are_made(tmp_path: Path, folds: int) -> None:
    with pytest.raises(ValueError, match=f"folds is {folds}; expected at least 2"):
        read_dna(write_csv(tmp_path / "x.csv", draw(6)), folds=folds)


def test_a_path_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no DNA data; expected CSV files"):
        read_dna(tmp_path)
    with pytest.raises(ValueError, match="does not exist; expected a file or folder with DNA data"):
        read_dna(tmp_path / "nowhere")
