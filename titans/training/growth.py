"""How long the sequences are that tasks draw: they begin short and double, by the steps or by the loss."""

from __future__ import annotations

import json
import math
from pathlib import Path

from titans.files import write_json
from titans.training.config import TrainConfig

FILE = "growth.json"  # in a checkpoint
SEEN = 20  # steps whose mean loss decides
AHEAD = 2  # the rows of the next step are drawn already when a step ends


class Growth:
    """The length of the sequences at every step of a run.

    With ``grow_below`` it doubles when the mean loss of the last ``SEEN`` steps at a length falls below that, else at
    fixed steps; in any case it is the full length once the share ``growth`` of the steps is over.

    Attributes:
        doubled: the steps from which on the length is twice as large.
    """

    def __init__(self, config: TrainConfig, steps: int) -> None:
        self.config, self.steps = config, steps
        self.doubled: list[int] = []
        self._losses: list[float] = []

    @property
    def by_loss(self) -> bool:
        """Whether the loss decides."""
        return self.config.grow_below is not None

    def __call__(self, row: int) -> int:
        """Tokens of the sequences in a row of :class:`titans.training.data.TaskRows`."""
        return self.length(row // self.config.rows)

    def length(self, step: int) -> int:
        """Tokens of a sequence at a step."""
        late = step >= self.config.growth * self.steps
        if late or self.config.grow_below is None or self.config.shortest is None:
            return self.config.sequence_length(step, self.steps)
        return self.config.shortest << sum(start <= step for start in self.doubled)

    def see(self, step: int, loss: float) -> None:
        """Takes note of the loss of a step."""
        if self.config.grow_below is None or self.length(step) == self.config.length:
            return
        if self.doubled and step < self.doubled[-1]:
            return  # what was drawn already is as long as before
        self._losses = [*self._losses, loss][-SEEN:] if math.isfinite(loss) else []
        if len(self._losses) == SEEN and sum(self._losses) / SEEN < self.config.grow_below:
            self.doubled.append(step + AHEAD)
            self._losses = []

    def save(self, folder: Path) -> None:
        """Keeps in a checkpoint what it has seen."""
        write_json(folder / FILE, {"doubled": self.doubled, "losses": self._losses})

    def load(self, folder: Path) -> None:
        """Goes on from a checkpoint."""
        kept = json.loads((folder / FILE).read_text())
        self.doubled, self._losses = kept["doubled"], kept["losses"]
