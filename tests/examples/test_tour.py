from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

TOUR = Path(__file__).parents[2] / "examples" / "tour.ipynb"
PICTURES = 3


def outputs_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def pictures_of(notebook: nbformat.NotebookNode) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs_of(notebook))


def test_the_tour_is_valid_compiles_and_was_saved_with_its_pictures() -> None:
    tour = nbformat.read(TOUR, as_version=4)
    nbformat.validate(tour)
    for number, cell in enumerate(tour.cells):
        if cell.cell_type == "code":
            compile(cell.source, f"cell {number}", "exec")
            assert cell.execution_count is not None
    assert pictures_of(tour) == PICTURES
    assert not [
        output for output in outputs_of(tour) if output.output_type == "error" or output.get("name") == "stderr"
    ]


@pytest.mark.slow
def test_the_tour_runs_and_shows_what_it_says() -> None:
    from nbclient import NotebookClient

    tour = nbformat.read(TOUR, as_version=4)
    claims = """
        assert alike.argmax(dim=1).tolist() == list(range(pairs))
        means = [float(part.mean()) for part in loss.split([len(part) for part in words])]
        assert max(means[1], means[3], means[4]) < 0.7 * min(means[0], means[2])
        assert loss[changed] == loss[len(words[0]) : len(words[0]) + len(words[1])].max()
        assert min(shares["memory on"][:7]) > 0.8 and max(shares["memory off"]) < 0.2
    """
    tour.cells.append(nbformat.v4.new_code_cell("\n".join(line.strip() for line in claims.splitlines())))
    done = NotebookClient(tour, timeout=120).execute()
    assert pictures_of(done) == PICTURES
