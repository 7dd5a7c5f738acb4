"""The shared wording of error messages."""

from __future__ import annotations

from moe_peft.utils.messages import choice_error, one_line, unknown_keys

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
    keys, foreign = (
        {"tok_p": 1, "r": 1, "zzz": 2, "yyy": 3, "rank": 4, "mode": "fast"},
        {"rank": "r", "mode: fast": "1"},
    )
    assert unknown_keys({"r": 1}, ["top_p", "r"], foreign=foreign) is None
    assert unknown_keys({"zzz": 1}, ["top_p", "r"], "s.") == "s.zzz: unknown key; known: r, top_p"
    assert unknown_keys(keys, ["top_p", "r", "mode"], "s.", "the manual", foreign) == (
        "s.tok_p: unknown key; did you mean 'top_p'? | s.rank: not a setting here; instead: r | s.mode: fast: not a "
        "setting here; instead: 1 | s.zzz, s.yyy: unknown keys; see the manual"
    )


def test_a_folder_may_have_the_name_of_another_programs_value(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert unknown_keys({"adapter": "lora"}, ["adapter"], foreign={"adapter: lora": "leave it out"})
    (tmp_path / "lora").mkdir()
    assert unknown_keys({"adapter": "lora"}, ["adapter"], foreign={"adapter: lora": "leave it out"}) is None
