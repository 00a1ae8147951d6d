"""`python -m titans` is the `titans` command: what torchrun and accelerate launch by its module's name."""

from titans.cli import main

main()
