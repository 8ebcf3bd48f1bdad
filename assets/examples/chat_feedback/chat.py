"""Chat with the policy through its gateway, and train it with your thumbs.

python chat.py [--gateway http://127.0.0.1:8790]        you ask, read, and press + or -
python chat.py --simulated 64                           a user who likes short answers
"""

import argparse
import os
from collections.abc import Callable, Sequence

import httpx2

GATEWAY = "http://127.0.0.1:8790"
SECONDS = 300.0
QUESTIONS = ("What is a database?", "Tell me about the sea.", "Why is the sky blue?", "How are you?")
SHORT = 60
"""Characters of an answer that the simulated user likes, at most."""

Ask = Callable[[], str]
Rate = Callable[[str], float | None]


class Product:
    """A product in front of the gateway: it keeps nothing but the answers that opened its conversations."""

    def __init__(self, gateway: str, key: str = "") -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx2.Client(base_url=gateway, headers=headers, timeout=SECONDS)

    def open(self, first: str) -> dict[str, str]:
        """Open a conversation; ``first`` is what people see of it in lists."""
        return dict(self._client.post("/conversations", json={"query": first}).raise_for_status().json())

    def say(self, conversation: dict[str, str], messages: Sequence[dict[str, str]]) -> str:
        """Return the policy's answer to the messages. Any OpenAI or Anthropic client does the same."""
        answer = self._client.post(
            f"{conversation['base_url']}/chat/completions",
            headers={"authorization": f"Bearer {conversation['api_key']}"},
            json={"model": conversation["model"], "messages": list(messages)},
        )
        return str(answer.raise_for_status().json()["choices"][0]["message"]["content"] or "")

    def rate(self, conversation: dict[str, str], score: float) -> None:
        """Give feedback and end the conversation. It may also come later, from another process."""
        given = {"id": conversation["id"], "score": score, "end": True}
        self._client.post("/feedback", json=given, headers=_key_of(conversation)).raise_for_status()

    def leave(self, conversation: dict[str, str]) -> None:
        """End a conversation without feedback: it waits for it, and is never trained without."""
        path = f"/conversations/{conversation['id']}/end"
        self._client.post(path, headers=_key_of(conversation)).raise_for_status()


def _key_of(conversation: dict[str, str]) -> dict[str, str]:
    """Return the header with the key of a conversation, which its model API does not have."""
    return {"authorization": f"Bearer {conversation['feedback_key']}"}


def chat(product: Product, ask: Ask, rate: Rate) -> float | None:
    """Answer one question, pass on what the user thinks of the answer, and return it."""
    question = ask()
    conversation = product.open(question)
    answer = product.say(conversation, [{"role": "user", "content": question}])
    score = rate(answer)
    if score is None:
        product.leave(conversation)
    else:
        product.rate(conversation, score)
    return score


def person(answer: str) -> float | None:
    """Show an answer and return the thumb of the person at the terminal."""
    print(f"policy > {answer}")
    return {"+": 1.0, "-": 0.0}.get(input("+ or -, or nothing > ").strip())


def simulated(answer: str) -> float | None:
    """Like short answers."""
    return float(len(answer) <= SHORT)


def main() -> None:
    """Chat until Ctrl-D, or simulate users."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gateway", default=GATEWAY, help="its URL (default: %(default)s)")
    parser.add_argument("--simulated", type=int, default=0, help="conversations of a simulated user")
    given = parser.parse_args()
    product = Product(given.gateway, os.environ.get("AGENTRL_GATEWAY_KEY", ""))
    liked = 0.0
    try:
        for number in range(given.simulated):
            question = QUESTIONS[number % len(QUESTIONS)]
            liked += chat(product, lambda question=question: question, simulated) or 0.0
            print(f"conversation {number + 1} of {given.simulated}: {liked:.0f} liked", flush=True)
        while not given.simulated:
            chat(product, lambda: input("you > "), person)
    except (EOFError, KeyboardInterrupt):
        print()
    except httpx2.HTTPStatusError as error:
        raise SystemExit(
            f"{error.request.url} answers {error.response.status_code}: {error.response.text}"
        ) from None
    except httpx2.TransportError as error:
        raise SystemExit(
            f"{given.gateway} does not answer: {error}\n  → start agentrl gateway --gateway_train feedback"
        ) from None


if __name__ == "__main__":
    main()
