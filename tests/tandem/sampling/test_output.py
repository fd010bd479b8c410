"""Stop rules and streamed text, against one look at the complete text."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.requests import FinishReason, OutputChunk, SampledToken, StopParams, TokenLogprobs
from tandem.sampling.output import OutputStream, TextStream
from tandem.testing.tiny import TINY_EOS_TOKEN_ID, write_tiny_llama
from tandem.tokenizer import Tokenizer, load_tokenizer
from tandem.weights.store import prepare

EOS = 0
LONG = 10_000


class Spelled:
    """A stream whose tokens are indexes into a list of texts, with a rest at the end."""

    def __init__(self, texts: Sequence[str], rest: str = "") -> None:
        self.texts = texts
        self.rest = rest

    def push(self, token_id: int) -> str:
        return self.texts[token_id]

    def flush(self) -> str:
        rest, self.rest = self.rest, ""
        return rest


def stop_params(**changes: Any) -> StopParams:
    return replace(StopParams(max_tokens=LONG), **changes)


def push_all(output: OutputStream, token_ids: Sequence[int]) -> list[OutputChunk]:
    """Push until the output is over; there may be tokens left."""
    chunks = []
    for token_id in token_ids:
        chunks.append(output.push(SampledToken(token_id=token_id)))
        assert output.finished == (chunks[-1].finish_reason is not None)
        if output.finished:
            break
    return chunks


def spell(*texts: str, rest: str = "", **changes: Any) -> tuple[list[str], FinishReason | None]:
    """Each token's text as it comes out, and why the output ended; "<eos>" is one token."""
    table = ["<eos>", *texts]
    output = OutputStream(stop_params(**changes), [EOS], Spelled(table, rest), LONG, 1)
    chunks = push_all(output, [EOS if text == "<eos>" else n for n, text in enumerate(texts, 1)])
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    return [chunk.text for chunk in chunks], chunks[-1].finish_reason


def test_text_without_stop_strings_is_never_held() -> None:
    assert spell("a", "b", "", "cd") == (["a", "b", "", "cd"], None)


# --- stop strings


def test_a_stop_string_inside_one_token() -> None:
    assert spell("a", "bENDc", "d", stop=("END",)) == (["a", "b"], "stop")


def test_a_stop_string_across_tokens() -> None:
    assert spell("aE", "N", "Dz", stop=("END",)) == (["a", "", ""], "stop")


def test_a_stop_string_that_is_all_of_the_text() -> None:
    assert spell("END", stop=("END",)) == ([""], "stop")


def test_what_only_looked_like_a_stop_string_comes_out() -> None:
    assert spell("aE", "N", "x", "y", stop=("END",)) == (["a", "", "ENx", "y"], None)


def test_a_stop_string_that_begins_inside_a_failed_one() -> None:
    assert spell("a", "a", "a", "b", stop=("aab",)) == (["", "", "a", ""], "stop")
    assert spell("ab", "ab", "ac", stop=("abac",)) == (["", "ab", ""], "stop")


def test_only_as_much_is_held_as_may_be_a_stop_string() -> None:
    assert spell("one\n", "\n", stop=("\n\n",)) == (["one", ""], "stop")
    assert spell("one\n", "two", stop=("\n\n",)) == (["one", "\ntwo"], None)


def test_of_several_stop_strings_the_first_complete_one_counts() -> None:
    assert spell("aXbYc", stop=("Y", "X")) == (["a"], "stop")
    assert spell("xabcd", stop=("abcd", "b")) == (["xa"], "stop")


def test_of_stop_strings_that_end_together_the_longest_counts() -> None:
    assert spell("xa", "b", "c", stop=("bc", "abc", "c")) == (["x", "", ""], "stop")


def test_the_longest_possible_beginning_is_held() -> None:
    stop = ("ab", "xabc")
    assert spell("xa", "z", stop=stop) == (["", "xaz"], None)
    assert spell("xa", "b", stop=stop) == (["", "x"], "stop")


def test_a_stop_string_of_many_characters() -> None:
    assert spell("日本", "語🙂", "x", stop=("本語🙂",)) == (["日", ""], "stop")


@pytest.mark.parametrize("stop", ["\n", ".", "zzz", "?\n"])
def test_held_text_comes_out_at_every_kind_of_end(stop: str) -> None:
    held = stop[:-1]
    assert spell("a", held, max_tokens=2, stop=(stop,)) == (["a", held], "length")
    assert spell("a", held, "<eos>", stop=(stop,))[0][1:] == (["", held] if held else ["", ""])
    assert spell("a" + held, max_tokens=1, stop=(stop,), rest="!") == (["a" + held + "!"], "length")


def test_a_stop_string_that_the_rest_completes() -> None:
    assert spell("aE", max_tokens=1, stop=("END",), rest="NDz") == (["a"], "stop")
    assert spell("aE", "<eos>", stop=("END",), rest="ND") == (["a", ""], "stop")


# --- tokens that stop


def test_the_text_of_an_ending_token_stays_out() -> None:
    assert spell("a", "<eos>", "b") == (["a", ""], "stop")
    assert spell("a", "b", "c", stop_token_ids=(2,)) == (["a", ""], "stop")


def test_the_first_token_may_end_the_output() -> None:
    assert spell("<eos>", "a") == ([""], "stop")
    assert spell("<eos>", "a", max_tokens=1) == ([""], "stop")


def test_eos_can_be_ignored_and_still_be_asked_for() -> None:
    assert spell("a", "<eos>", "b", ignore_eos=True) == (["a", "<eos>", "b"], None)
    changes: dict[str, Any] = {"ignore_eos": True, "stop_token_ids": (EOS,)}
    assert spell("a", "<eos>", "b", **changes) == (["a", ""], "stop")


def test_an_ending_token_gives_back_what_was_held() -> None:
    assert spell("aEN", "<eos>", stop=("END",), rest="?") == (["a", "EN?"], "stop")


# --- counts


@pytest.mark.parametrize("count", [1, 2, 5])
def test_max_tokens(count: int) -> None:
    assert spell(*"abcdef", max_tokens=count) == (list("abcdef"[:count]), "length")


@pytest.mark.parametrize(("context", "prompt", "count"), [(10, 7, 3), (10, 9, 1), (10, 1, 4)])
def test_the_context_is_a_limit_too(context: int, prompt: int, count: int) -> None:
    output = OutputStream(stop_params(max_tokens=4), [EOS], Spelled("?abcdef"), context, prompt)
    chunks = push_all(output, [1, 2, 3, 4, 5, 6])
    assert len(chunks) == count
    assert chunks[-1].finish_reason == "length"


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    assert spell("a", "END", max_tokens=2, stop=("END",)) == (["a", ""], "stop")
    assert spell("a", "<eos>", max_tokens=2) == (["a", ""], "stop")


def test_min_tokens_puts_off_all_stops() -> None:
    assert spell("<eos>", "a", "<eos>", min_tokens=2) == (["<eos>", "a", ""], "stop")
    assert spell("X", "X", "X", min_tokens=2, stop=("X",)) == (["X", "X", ""], "stop")
    assert spell("a", "b", "c", "b", min_tokens=2, stop_token_ids=(2, 4))[0] == ["a", "b", "c", ""]


def test_a_stop_string_counts_only_after_min_tokens() -> None:
    assert spell("E", "N", "D", "END", min_tokens=2, stop=("END",))[0] == ["E", "N", "D", ""]


def test_max_tokens_wins_over_min_tokens() -> None:
    assert spell("a", "X", min_tokens=5, max_tokens=2, stop=("X",)) == (["a", "X"], "length")


# --- chunks


def test_chunks_carry_index_token_and_log_probabilities() -> None:
    output = OutputStream(stop_params(max_tokens=3), [EOS], Spelled(["", "a", "b", "c"]), LONG, 1)
    entries = [TokenLogprobs(logprob=-0.5 * n, top=((n, -0.1),)) for n in range(3)]
    chunks = [
        output.push(SampledToken(token_id=n + 1, logprobs=entry)) for n, entry in enumerate(entries)
    ]
    assert [chunk.index for chunk in chunks] == [0, 1, 2]
    assert [chunk.token_ids for chunk in chunks] == [(1,), (2,), (3,)]
    assert [chunk.logprobs for chunk in chunks] == [(entry,) for entry in entries]
    assert output.finished


def test_the_ending_token_has_its_entry_too() -> None:
    output = OutputStream(stop_params(), [EOS], Spelled(["", "a"]), LONG, 1)
    chunk = output.push(SampledToken(token_id=EOS, logprobs=TokenLogprobs(logprob=-1.0)))
    assert chunk.token_ids == (EOS,)
    assert len(chunk.logprobs) == 1


def test_nothing_may_follow_the_end() -> None:
    output = OutputStream(stop_params(), [EOS], Spelled(["", "a"]), LONG, 1)
    output.push(SampledToken(token_id=EOS))
    with pytest.raises(AssertionError):
        output.push(SampledToken(token_id=1))


# --- the oracle: the complete text first, the rules afterwards


@dataclass(frozen=True)
class Expected:
    text: str
    num_tokens: int
    reason: FinishReason | None


def look_once(
    token_ids: Sequence[int],
    final_text: Callable[[Sequence[int]], str],
    whole_text: Callable[[Sequence[int]], str],
    stop: StopParams,
    ending: frozenset[int],
) -> Expected:
    """Decide on the complete text.

    Args:
        token_ids: what the model would give if nothing stopped it.
        final_text: of some leading tokens, the text that no later token can change.
        whole_text: of some leading tokens, all text, ended there.
        stop: with the context's limit in ``max_tokens``.
        ending: tokens that end the output after ``min_tokens``.
    """
    count = shown = min(len(token_ids), stop.max_tokens)
    reason: FinishReason | None = None
    for place, token_id in enumerate(token_ids[:count]):
        if token_id in ending and place >= stop.min_tokens:
            count, shown, reason = place + 1, place, "stop"
            break
    over = reason is not None or count == stop.max_tokens
    if over and reason is None:
        reason = "length"
    text = whole_text(token_ids[:shown]) if over else final_text(token_ids[:shown])
    early = len(final_text(token_ids[: stop.min_tokens])) if count > stop.min_tokens else len(text)
    found = [(start + len(it), start) for it in stop.stop if (start := text.find(it, early)) >= 0]
    if not found:
        return Expected(text, count, reason)
    end, start = min(found)
    lengths = [len(final_text(token_ids[:n])) for n in range(1, count)]
    return Expected(text[:start], sum(length < end for length in lengths) + 1, "stop")


def check_stream(
    text: TextStream,
    token_ids: Sequence[int],
    final_text: Callable[[Sequence[int]], str],
    expected: Expected,
    stop: StopParams,
    eos_token_ids: Sequence[int],
) -> None:
    output = OutputStream(stop, eos_token_ids, text, LONG, 1)
    chunks = push_all(output, token_ids)
    assert [chunk.index for chunk in chunks] == list(range(expected.num_tokens))
    assert [chunk.token_ids for chunk in chunks] == [(it,) for it in token_ids[: len(chunks)]]
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == expected.reason
    seen = ""
    for count, chunk in enumerate(chunks, 1):
        seen += chunk.text
        if chunk.finish_reason is None:
            held = final_text(token_ids[:count])[len(seen) :]
            assert not held or any(it.startswith(held) and it != held for it in stop.stop)
            assert not held or count > stop.min_tokens
    if expected.reason is None:
        assert expected.text.startswith(seen)
    else:
        assert seen == expected.text


def random_stop(texts: st.SearchStrategy[str]) -> st.SearchStrategy[StopParams]:
    return st.builds(
        StopParams,
        max_tokens=st.integers(1, 30),
        min_tokens=st.sampled_from([0, 0, 0, 1, 2, 5]),
        stop=st.lists(texts.filter(bool), max_size=3).map(tuple),
        stop_token_ids=st.sampled_from([(), (), (1,), (1, 2)]),
        ignore_eos=st.booleans(),
    )


def ending_tokens(stop: StopParams, eos_token_id: int) -> frozenset[int]:
    return frozenset(stop.stop_token_ids) | (set() if stop.ignore_eos else {eos_token_id})


short_texts = st.text("ab", max_size=4)


@settings(max_examples=400)
@given(
    texts=st.lists(short_texts, min_size=4, max_size=8),
    rest=short_texts,
    stop=random_stop(short_texts),
    data=st.data(),
)
def test_any_stream_of_texts(
    texts: list[str], rest: str, stop: StopParams, data: st.DataObject
) -> None:
    token_ids = data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=25))

    def joined(ids: Sequence[int]) -> str:
        return "".join(texts[it] for it in ids)

    expected = look_once(
        token_ids, joined, lambda ids: joined(ids) + rest, stop, ending_tokens(stop, EOS)
    )
    check_stream(Spelled(texts, rest), token_ids, joined, expected, stop, [EOS])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(folder)
    return load_tokenizer(prepare(str(folder)))


characters = st.sampled_from(["a", "b", "é", "한", "語", "🙂", "\N{REPLACEMENT CHARACTER}"])
byte_pieces = st.one_of(
    characters.map(str.encode),
    st.binary(min_size=1, max_size=2),
    st.sampled_from([b"\xf0\x9f", b"\xe9"]),
)


@settings(max_examples=300)
@given(
    pieces=st.lists(byte_pieces, min_size=1, max_size=12),
    eos_at=st.none() | st.integers(0, 20),
    stop=random_stop(st.lists(characters, max_size=3).map("".join)),
)
def test_any_stream_of_bytes(
    tokenizer: Tokenizer, pieces: list[bytes], eos_at: int | None, stop: StopParams
) -> None:
    """One byte is one token, so that characters and stop strings cross tokens in every way."""
    token_ids = list(b"".join(pieces))
    if eos_at is not None:
        token_ids.insert(eos_at, TINY_EOS_TOKEN_ID)

    def final_text(ids: Sequence[int]) -> str:
        shown = bytes(it for it in ids if it != TINY_EOS_TOKEN_ID)
        return codecs.getincrementaldecoder("utf-8")("replace").decode(shown)

    expected = look_once(
        token_ids, final_text, tokenizer.decode, stop, ending_tokens(stop, TINY_EOS_TOKEN_ID)
    )
    check_stream(tokenizer.stream(), token_ids, final_text, expected, stop, [TINY_EOS_TOKEN_ID])
