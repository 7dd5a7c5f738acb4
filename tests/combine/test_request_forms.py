"""
Which adapter a request is for, however it is written: with SmolLM2, and forms that the gate's texts do not have.

A document, a polite wrapping, a quotation, a second turn: none of their words is in the package's lists.
"""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo.smollm2 import smollm2_folder
from moe_peft import RequestGate

TEXTS = {
    "kitchen": [
        "how do i make pancakes", "how long should i boil an egg", "what can i use instead of butter",
        "is this chicken still good", "how many calories are in rice", "what is a good recipe for lasagna",
        "how do you cook salmon", "what spices go into curry", "how long can i keep soup in the fridge",
        "what do i need to bake bread", "find me a dinner with beans", "at what temperature do i roast a turkey",
        "can i freeze cooked pasta", "how do i thicken a sauce", "how much sugar is in an apple pie",
        "what goes well with mushrooms", "how do i peel garlic fast", "suggest a soup without cream",
        "how long does it take to bake a potato", "what can i cook with leeks", "is tofu healthy",
        "how do i know when a steak is done", "give me a recipe for tomato salad", "can i replace eggs in a cake",
    ],
    "bank": [
        "what is my account balance", "transfer 200 dollars to my savings", "my card was stolen",
        "how do i change my pin", "when is my credit card bill due", "freeze my account please",
        "what did i spend on groceries last month", "order new checks for me", "what is my credit limit",
        "pay my electricity bill", "why was my card declined", "what is the interest rate of my loan",
        "how do i report a fraud on my account", "show me my last transactions", "what is my routing number",
        "increase my credit limit", "is there a fee for a transfer abroad", "how do i open a savings account",
        "did my salary arrive", "my account is blocked", "what is the minimum payment on my card",
        "send 50 dollars from checking to anna", "when will my new card come", "how many points does my card have",
    ],
}  # fmt: skip
ASKED = {
    "kitchen": ["how do i cook lentils", "how long do i boil potatoes", "what can i use instead of eggs"],
    "bank": ["transfer 30 dollars to my checking account", "what is the balance of my savings", "my card was declined"],
}
DOCUMENT = (
    "The lighthouse on the cape was completed in 1821. Its keeper climbed a hundred and twelve steps every evening. "
    "After the storm of 1903 the lamp was replaced. Today the tower is a small museum, which opens in May."
)
KEPT = {
    "as in the data": "{}",
    "in capitals": "{upper}",
    "as a sentence": "{sentence}.",
    "behind a document": DOCUMENT + "\n\n{}",
    "before a document": "{}\n\n" + DOCUMENT,
    "polite": "Good day to you! It would be marvellous if you had a minute for me. {sentence}. All the best, Theo",
}
TO_BASE = ("Translate into Dutch: {}", "Rewrite this as a headline: {}", "Is this sentence polite? {sentence}.")
GENERAL = (
    "who was the first king of norway", "Who was the first king of Norway?", "write a song about a train",
    "tell me something about whales", "Wie hoch ist der Eiffelturm?", DOCUMENT,
)  # fmt: skip


@pytest.fixture(scope="module")
def gate():
    folder = smollm2_folder()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return RequestGate.fit(model.eval(), TEXTS, tokenizer=tokenizer, chat=True)


def written(form: str, text: str) -> str:
    return form.format(text, upper=text.upper(), sentence=text.capitalize())


@pytest.mark.parametrize("form", KEPT)
def test_a_request_in_another_form_keeps_its_adapter(gate, form):
    asked = [(written(KEPT[form], text), name) for name, texts in ASKED.items() for text in texts]
    choices = gate.choose([text for text, _ in asked])
    assert [choice.name for choice in choices] == [name for _, name in asked]
    assert all(choice.text in text for choice, (text, _) in zip(choices, asked, strict=True))


@pytest.mark.parametrize("form", TO_BASE)
def test_a_request_about_a_quoted_request_goes_to_the_base(gate, form):
    assert gate.pick([written(form, text) for texts in ASKED.values() for text in texts]) == [None] * 6


def test_general_requests_go_to_the_base_however_written(gate):
    assert gate.pick(GENERAL) == [None] * len(GENERAL)


def chat(*turns: str) -> list[dict[str, str]]:
    """The user's turns, with answers between them."""
    messages = [
        {"role": role, "content": text} for text in turns for role, text in (("user", text), ("assistant", "x"))
    ]
    return messages[:-1]


def test_a_message_that_refers_to_an_earlier_one_has_its_adapter(gate):
    cook, pay, king = ASKED["kitchen"][0], ASKED["bank"][0], GENERAL[0]
    again, more = "and the same for six people", "What about tomorrow?"
    asked = [chat(cook, again), chat(cook, pay, again, more), chat(pay, cook), chat(king, again), chat(again)]
    choices = gate.choose(asked)
    assert [choice.name for choice in choices] == ["kitchen", "bank", "kitchen", None, None]
    assert [choice.text for choice in choices[:2]] == [cook, pay]


def test_an_adapter_whose_own_requests_are_about_a_text_keeps_them():
    """Otherwise all of them would go to the base, as "Translate into Dutch: …" does."""
    people = [f"{name}, {age}, {city}" for name, age in (("Ann", 30), ("Bo", 41), ("Cy", 27)) for city in (
        "Rome", "Oslo", "Cork", "Bonn", "Nice", "Bath", "Riga", "Graz",
    )]  # fmt: skip
    folder = smollm2_folder()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = {"json": [f"Give this as JSON: {person}." for person in people], "bank": TEXTS["bank"]}
    gate = RequestGate.fit(model.eval(), texts, tokenizer=tokenizer, chat=True)
    assert gate.pick([f"Give this as JSON: {name}, 55, Lyon." for name in ("Dee", "Eve", "Flo")]) == ["json"] * 3
    assert gate.pick([f"Translate into Dutch: {text}" for text in ASKED["bank"]]) == [None] * 3
