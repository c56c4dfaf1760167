import json
from typing import Any

import pytest

from dflash_trt.cli.prompts import Defaults, InputRow, Job, Refusal, decoded_row, row_of, rows_of_texts
from dflash_trt.core.request import SamplingParams

DEFAULTS = Defaults(sampling=SamplingParams(max_new_tokens=7, temperature=0.5))


def test_rows_take_the_command_lines_sampling_unless_they_bring_their_own() -> None:
    plain, own = _rows(
        {"prompt": "a"}, {"prompt": "b", "temperature": 0, "seed": 3, "stop": "x", "stop_token_ids": [1]}
    )
    assert plain == Job(row_id=1, prompt={"prompt": "a"}, sampling=DEFAULTS.sampling)
    assert isinstance(own, Job)
    assert own.sampling == SamplingParams(max_new_tokens=7, temperature=0, seed=3, stop=("x",), stop_token_ids=(1,))


def test_every_kind_of_prompt_is_passed_on() -> None:
    messages = [{"role": "user", "content": "hi"}]
    prompts = [{"prompt": "a"}, {"messages": messages}, {"prompt_token_ids": [1, 2]}]
    assert [_prompt(row) for row in _rows(*prompts)] == prompts


def test_ids_are_the_rows_own_or_line_numbers() -> None:
    rows = _rows({"prompt": "a"}, {"prompt": "b", "id": "mine"}, {"prompt": "c"})
    assert [row.row_id for row in rows] == [1, "mine", 3]


@pytest.mark.parametrize("row_id", [0, -1, "", "a"])
def test_every_text_and_every_integer_is_an_id(row_id: int | str) -> None:
    assert [row.row_id for row in _rows({"prompt": "a"}, {"prompt": "b", "id": row_id})] == [1, row_id]


def test_chat_wraps_text_and_the_system_message_is_added_where_there_is_none() -> None:
    defaults = Defaults(sampling=SamplingParams(), wraps_in_chat=True, system="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    own_system = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "hi"}]
    late = own_system[::-1]
    given = ({"prompt": "a"}, *({"messages": messages} for messages in ([{"role": "user"}], own_system, late)))
    rows = _rows(*given, defaults=defaults)
    assert [_prompt(row) for row in rows] == [
        {"messages": [system, {"role": "user", "content": "a"}]},
        {"messages": [system, {"role": "user"}]},
        {"messages": own_system},
        {"messages": late},
    ]


def test_template_options_of_the_command_line_reach_conversations_and_rows_override_them() -> None:
    defaults = Defaults(sampling=SamplingParams(), chat_template_kwargs={"enable_thinking": False, "depth": 1})
    messages = [{"role": "user", "content": "hi"}]
    own = {"depth": 2, "date": "today"}
    rows = _rows(
        {"messages": messages}, {"messages": messages, "chat_template_kwargs": own}, {"prompt": "a"}, defaults=defaults
    )
    assert [_prompt(row) for row in rows] == [
        {"messages": messages, "chat_template_kwargs": {"enable_thinking": False, "depth": 1}},
        {"messages": messages, "chat_template_kwargs": {"enable_thinking": False, "depth": 2, "date": "today"}},
        {"prompt": "a"},
    ]
    (wrapped,) = rows_of_texts(["a"], Defaults(sampling=SamplingParams(), wraps_in_chat=True, chat_template_kwargs=own))
    assert _prompt(wrapped)["chat_template_kwargs"] == own


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "a"', "expected a JSON object"),
        (b'{"prompt": "\xff"}', "expected UTF-8 text, found byte 0xff at 12"),
        (b"[1]", "found a JSON list"),
        (b'"text"', "found a JSON str"),
        (b"[" * 100_000, "expected a JSON object"),
        (b"{}", "expected exactly one of prompt, messages, prompt_token_ids, turns, found none"),
        (b'{"messages": 3}', "messages: expected a list of objects, found 3"),
        (b'{"turns": [1]}', "turns: expected a list of texts, found [1]"),
        (b'{"prompt": "a", "messages": []}', "found prompt and messages"),
        (b'{"prompt": "a", "temprature": 1}', "Did you mean 'temperature'?"),
        (b'{"prompt": "a", "zzz": 1}', "Known names: id, prompt"),
        (b'{"prompt": "a", "max_new_tokens": 0}', "sampling max_new_tokens: expected an integer of 1 or more, found 0"),
        (
            b'{"prompt": "a", "max_new_tokens": "9"}',
            "sampling max_new_tokens: expected an integer of 1 or more, found '9'",
        ),
        (b'{"prompt": "a", "max_new_tokens": true}', "sampling max_new_tokens"),
        (b'{"prompt": "a", "temperature": null}', "sampling temperature"),
        (b'{"prompt": "a", "temperature": NaN}', "sampling temperature: expected 0 (greedy) to 10000, found nan"),
        (b'{"prompt": "a", "top_p": 0}', "sampling top_p"),
        (b'{"prompt": "a", "stop": [""]}', "sampling stop: expected non-empty strings"),
        (b'{"prompt": "a", "stop": [1, 2]}', "sampling stop"),
        (b'{"prompt": "a", "seed": 99999999999999999999}', "sampling seed"),
        (b'{"prompt": "a", "chat_template_kwargs": {"b": 1}}', "chat_template_kwargs: expected only in a conversation"),
        (b'{"messages": [], "chat_template_kwargs": [1]}', "chat_template_kwargs: expected an object, found [1]"),
        (b'{"messages": [], "chat_template_kwargs": null}', "chat_template_kwargs: expected an object, found None"),
        (b'{"messages": [], "chat_template_kwargs": {"chat_template": ""}}', "found chat_template, decided by the"),
        (b'{"prompt": "a", "id": 1.5}', "an id that is a string or an integer"),
        (b'{"prompt": "a", "id": true}', "an id that is a string or an integer, found True"),
        (b'{"prompt": "a", "category": 5}', "category: expected text, found 5"),
        (b'{"prompt": "\\ud800"}', "expected valid Unicode text"),
        (b'{"prompt": "a", "id": "\\udfff"}', "expected valid Unicode text"),
    ],
)
def test_a_wrong_row_is_refused_alone(line: bytes, said: str) -> None:
    before, refused, after = _read([b'{"prompt": "a"}', line, b'{"prompt": "b"}'], DEFAULTS)
    assert isinstance(before, Job)
    assert isinstance(after, Job)
    assert isinstance(refused, Refusal)
    assert refused.row_id == 2
    assert said in refused.error


def test_turns_are_messages_of_a_user_and_a_system_message_goes_before_the_first() -> None:
    one, two = ({"role": "user", "content": text} for text in ("one", "two"))
    system = {"role": "system", "content": "s"}
    first, text = _rows(
        {"turns": ["one", "two"]}, {"turns": "one"}, defaults=Defaults(sampling=SamplingParams(), system="s")
    )
    assert isinstance(first, Job) and isinstance(text, Job)
    assert (first.prompt, first.later_turns) == ({"messages": [system, one]}, ([two],))
    assert (text.prompt, text.later_turns) == ({"messages": [system, one]}, ())


def test_messages_without_a_user_are_one_turn() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "tool", "content": "t"}]
    [row] = _rows({"messages": messages, "question_id": "q"})
    assert isinstance(row, Job) and _prompt(row) == {"messages": messages} and not row.later_turns


def test_messages_that_have_their_answers_are_one_turn() -> None:
    talk = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    defaults = Defaults(sampling=SamplingParams())
    job = row_of(1, {"question_id": 7, "messages": talk}, defaults)
    assert isinstance(job, Job) and (job.row_id, job.prompt, job.later_turns) == (7, {"messages": talk}, ())
    unanswered = row_of(1, {"question_id": 7, "messages": [talk[0], talk[2]]}, defaults)
    assert isinstance(unanswered, Job) and unanswered.later_turns == ([talk[2]],)


def test_all_problems_of_a_row_are_named() -> None:
    (row,) = _rows({"temperature": 2, "tempo": 1})
    assert isinstance(row, Refusal)
    assert "2 problems" in row.error


def test_prompts_of_the_command_line_are_numbered() -> None:
    assert [row.row_id for row in rows_of_texts(["a", "b"], DEFAULTS)] == [1, 2]


def _rows(*rows: dict[str, Any], defaults: Defaults = DEFAULTS) -> list[InputRow]:
    return _read([json.dumps(row).encode() for row in rows], defaults)


def _read(lines: list[bytes], defaults: Defaults) -> list[InputRow]:
    return [row_of(number, decoded_row(number, line), defaults) for number, line in enumerate(lines, start=1)]


def _prompt(row: InputRow) -> Any:
    assert isinstance(row, Job)
    return row.prompt
