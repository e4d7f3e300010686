"""Twenty chat prompts for SmolLM2: questions, tasks, code, arithmetic, other scripts, turns, a system prompt."""

from typing import Any

Messages = list[dict[str, Any]]

QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about an owl who cannot sleep.",
    "List five things to pack for a week in the mountains.",
    "What is 17 + 26? Show your steps.",
    "A train travels 120 km in 2 hours. How fast is it?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Fix this code: for i in range(10) print(i)",
    "Summarise: The meeting moved from Monday to Wednesday at 3:15 pm because two rooms were double-booked.",
    "Translate to Spanish: 'Where is the library?'",
    "Was bedeutet das Wort 'Feierabend'?",
    "写一句关于春天的话。",
    "Give me a recipe for pancakes with 3 eggs.",
    "Who wrote 'Pride and Prejudice', and when was it published?",
    "Complete the sentence: The quick brown fox",
    "Tell me a joke about computers.",
    "  Why   are\n\nspaces\there odd?  ",
    "Name three prime numbers larger than 100 😀",
)
PROMPTS: list[Messages] = [[{"role": "user", "content": text}] for text in QUESTIONS] + [
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada!"},
        {"role": "user", "content": "What is my name?"},
    ],
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "Which planet is closest to the sun?"},
    ],
]
NEW_TOKENS = 64
