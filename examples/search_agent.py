"""An agent that answers questions by searching a corpus, with BM25 on this machine.

areal-debug agent run examples/search_agent.py:SearchAgent \\
    --data examples/search/questions.jsonl --model MODEL
areal-debug train examples/search_agent.py --dump-rollout
areal-debug agent replay 'RECORD#3/17/0' examples/search_agent.py:SearchAgent

The index is of bm25s: pip install 'areal-debug[search]'. A corpus is a file of JSON lines with
`title` and `text`.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
from openai import AsyncOpenAI

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it logs each index
CORPUS = Path(__file__).parent / "search" / "corpus.jsonl"
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Returns the pages that fit the words of a query best.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    },
}


class Pages:
    """A corpus and its index. Equal queries get equal pages, on every machine."""

    def __init__(self, corpus: str | Path = CORPUS) -> None:
        lines = Path(corpus).read_text(encoding="utf-8").splitlines()
        self.texts = [text_of(line, f"{corpus}, line {i}") for i, line in enumerate(lines, 1)]
        words = bm25s.tokenize(self.texts, stopwords="en", show_progress=False)
        if not words.vocab:
            raise ValueError(f"{corpus} has {len(lines)} pages and no word: give JSON lines with a text")
        self.index = bm25s.BM25()
        self.index.index(words, show_progress=False)

    def search(self, query: str, count: int) -> list[str]:
        """Return the pages with a word of the query, the best first, at most `count`."""
        [words] = bm25s.tokenize([query], stopwords="en", return_ids=False, show_progress=False)
        known = [word for word in words if word in self.index.vocab_dict]
        if not known:
            return []
        scores = self.index.get_scores(known)
        # stable: pages with equal scores keep their order in the corpus
        best = np.argsort(-scores, kind="stable")[:count]
        return [self.texts[page] for page in best if scores[page] > 0]


def text_of(line: str, where: str) -> str:
    """Return the text of a page. Raises ValueError if the line is none."""
    try:
        return str(json.loads(line)["text"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{where} is {line[:40]!r}; expected a JSON object with title and text") from None


class SearchAgent:
    """Lets the model search; rewards a last message that is the row's answer.

    Args:
        corpus: file of JSON lines; by default the one beside this file.
        max_turns: calls of the model, the answer included.
        num_pages: that a search returns.
    """

    def __init__(self, corpus: str | Path = CORPUS, max_turns: int = 4, num_pages: int = 3) -> None:
        self.pages = Pages(corpus)
        self.max_turns = max_turns
        self.num_pages = num_pages

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        client = AsyncOpenAI(
            base_url=extra["base_url"],
            api_key=extra["api_key"],
            http_client=extra["http_client"],
            max_retries=0,
        )
        messages = list(data["messages"])
        for _ in range(self.max_turns):
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=[SEARCH])
            message = reply.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return float(words_of(message.content or "") == words_of(data["answer"]))
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": self.search(call.function.arguments)}
                for call in message.tool_calls
            ]
        return 0.0

    def search(self, arguments: str) -> str:
        """Return pages, or an error message for the model."""
        try:
            query = json.loads(arguments)["query"]
            found = self.pages.search(query, self.num_pages)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"error: {error}"
        return "\n".join(found) or "no page has these words"


def words_of(text: str) -> list[str]:
    """Return the words of an answer: case and punctuation at the ends do not count."""
    return [word for word in (each.strip(".,!?:;\"'").lower() for each in text.split()) if word]


def main(argv: list[str]) -> None:
    # The trainer is imported here, so that the agent above can be run anywhere that openai is.
    from areal_core.config import GRPOConfig
    from areal_core.data import get_dataset
    from areal_core.trainer.build import load_tokenizer
    from areal_core.trainer.rl import PPOTrainer
    from areal_debug.wiring import wire

    config, hooks = wire(argv, GRPOConfig)
    tokenizer = load_tokenizer(config)
    train_dataset = get_dataset(config.train_dataset, tokenizer=tokenizer)
    with PPOTrainer(config, train_dataset, **hooks) as trainer:
        trainer.train(workflow=SearchAgent)


if __name__ == "__main__":
    main(sys.argv)
