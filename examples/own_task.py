"""Add a task of your own: sequences that ask something, a tiny model that learns it, and a control.

A password stands somewhere in noise, and the end asks for it. `titans eval MODEL --tasks examples/own_task.py` and
`titans train --data task:examples/own_task.py` take this file as it is: see docs/evaluation.md.

    python examples/own_task.py
"""

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from titans import TitansConfig, TitansForCausalLM
from titans.evaluation.score import score
from titans.tasks import Answer, Example, Task, example

SECRETS, NOISE, MARK, ASK = range(16), range(16, 32), 32, 33


@dataclass(frozen=True)
class Password(Task):
    """Noise, MARK, a secret, more noise; then ASK, after which the secret should follow."""

    lengths: tuple[int, ...] = (32, 128, 512)
    name: ClassVar[str] = "password"
    title: ClassVar[str] = "A password in noise"
    source: ClassVar[str] = "this file"
    axes: ClassVar[tuple[str, ...]] = ("length",)
    vocab_size, chance = 34, 1 / 16

    def groups(self) -> list[dict[str, Any]]:
        return [{"length": length} for length in self.lengths]  # one cell of the table each

    def draw(self, rng: random.Random, group: Any, split: str, tokenizer: Any) -> Example:
        """One sequence; `split` and `tokenizer` matter to tasks of text."""
        secret, noise = rng.choice(SECRETS), rng.choices(NOISE, k=group["length"] - 4)
        place = rng.randrange(len(noise) // 2)
        tokens = [*noise[:place], MARK, secret, *noise[place:], ASK, secret]
        return Example(tokens, [Answer(len(tokens) - 1, (secret,))], boundary=len(tokens) - 2)


if __name__ == "__main__":
    torch.manual_seed(0)
    task = Password()
    small = {"hidden_size": 32, "num_hidden_layers": 1, "memory_heads": 1, "memory_depth": 1}
    model = TitansForCausalLM(TitansConfig(variant="lmm", vocab_size=task.vocab_size, **small))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0)
    for step in range(120):
        batch = [example(task, "train", seed=0, number=step * 32 + row, group=32) for row in range(32)]
        labels = torch.tensor([each.labels() for each in batch])  # ignored wherever nothing is asked
        logits = model(torch.tensor([each.tokens for each in batch])).logits
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
    for control, group in [(control, group) for control in (None, "swap") for group in task.groups()]:
        tests = [example(task, "test", seed=0, number=number, group=group) for number in range(50)]
        right = sum(answer.right for answers in score(model, tests, control) for answer in answers)
        print(f"{group['length']} tokens, {'another' if control else 'its own'} memory: {right} of 50, chance is 3")
