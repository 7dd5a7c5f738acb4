"""The shared wording of error messages."""

from __future__ import annotations

from moe_peft.utils.messages import choice_error, one_line, unknown_key

URL = "https://example.org/a/long/path?with=parts&and=more"


def test_a_long_text_is_cut_between_words_and_never_inside_a_url():
    assert one_line(ValueError("two\n  lines ")) == "two lines"
    text = f"no such model; see {URL} for what there is"
    for limit in range(1, len(text) + 5):
        found = one_line(text, limit)
        assert len(found) <= limit
        if found == text:
            continue
        assert found.endswith("…")
        assert URL in found or "http" not in found
        if limit > len("no …"):
            words = found.removesuffix(" …").split()
            assert words == text.split()[: len(words)]
    assert one_line(text, len(text)) == text


def test_a_single_word():
    assert one_line("x" * 50, 10) == "x" * 9 + "…"
    assert one_line(URL + "/" + URL, 20) == "…"


def test_names_and_keys():
    assert choice_error("r", 3, ["a", "b"]) == "r=3: must be one of a, b"
    assert unknown_key("s.tok_p", ["top_p", "r"]) == "s.tok_p: unknown key; did you mean 'top_p'?"
    assert unknown_key("s.zzz", ["top_p", "r"]) == "s.zzz: unknown key; known: r, top_p"
    assert unknown_key("s.zzz", ["top_p", "r"], "the manual") == "s.zzz: unknown key; see the manual"
