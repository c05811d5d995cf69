"""Prompts: every line is checked, and says where and why when it is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from data_road import run_prompts, source, write_lines

from dflash.base.canonical import digest
from dflash.base.errors import ConfigError, PermanentError
from dflash.base.stage import HostContext, Inputs
from dflash.data import prompts
from dflash.data.prompts import messages_id, question_id, validate_prompts_file
from dflash.data.schemas import PROMPTS
from dflash.data.tables import ROW_GROUP, read_rows

ASK = {"role": "user", "content": "2+2?"}

MALFORMED = {
    "bad JSON": (b'{"prompt": "a"', "not JSON", '{"prompt": "a"'),
    "not an object": (b'["a"]', "a list, not an object", '["a"]'),
    "a bare text": (b'"a"', "text, not an object", '"a"'),
    "no known field": (b'{"text": "a"}', "neither `messages` nor `prompt`", '["text"]'),
    "prompt of a wrong type": (b'{"prompt": 3}', "`prompt` is a number", "3"),
    "prompt null": (b'{"prompt": null}', "`prompt` is null", "null"),
    "prompt a truth value": (b'{"prompt": true}', "`prompt` is a truth value", "true"),
    "empty prompt": (b'{"prompt": " \\n"}', "`prompt` is empty", '" \\n"'),
    "not UTF-8": (b'{"prompt": "\xff"}', "not UTF-8", "byte 13"),
    "half a surrogate": (b'{"prompt": "\\ud800"}', "surrogate", "\\ud800"),
    "nested without end": (b"[" * 200_000, "nested too deeply", "one JSON object"),
    "messages of a wrong type": (b'{"messages": "a"}', "`messages` is text", '"a"'),
    "no messages": (b'{"messages": []}', "`messages` is an empty list", "[]"),
    "a message of a wrong type": (b'{"messages": [4]}', "`messages[0]` is a number", "4"),
    "no role": (b'{"messages": [{"content": "a"}]}', "`messages[0].role` is missing", '{"content": "a"}'),
    "no content": (b'{"messages": [{"role": "user"}]}', "`messages[0].content` is missing", '{"role": "user"}'),
    "unknown role": (b'{"messages": [{"role": "bot", "content": "a"}]}', "`messages[0].role` is", '"bot"'),
    "role of a wrong type": (b'{"messages": [{"role": [], "content": "a"}]}', "`messages[0].role` is", "[]"),
    "content of a wrong type": (b'{"messages": [{"role": "user", "content": [1]}]}', "`messages[0].content`", "[1]"),
    "empty content": (b'{"messages": [{"role": "user", "content": ""}]}', "`messages[0].content` is empty", '""'),
    "an answer at the end": (
        json.dumps({"messages": [ASK, {"role": "assistant", "content": "4"}]}).encode(),
        "`messages[1].role` is",
        '"assistant"',
    ),
    "a late system message": (
        json.dumps({"messages": [ASK, {"role": "system", "content": "x"}, ASK]}).encode(),
        "`messages[1]` is a system message",
        "first",
    ),
}


@pytest.mark.parametrize(("line", "what", "given"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_line_is_refused_with_file_line_field_and_value(
    tmp_path: Path, line: bytes, what: str, given: str
) -> None:
    path = tmp_path / "source.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n\n' + line + b"\n")
    with pytest.raises(ConfigError) as planned:
        validate_prompts_file(path, source(path))
    with pytest.raises(ConfigError) as staged:
        run_prompts(path, tmp_path / "out")
    assert str(planned.value) == str(staged.value)
    assert planned.value.where == f"{path}:3"
    assert what in str(planned.value)
    assert given in str(planned.value)


def test_a_long_value_is_shortened_in_the_message(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "source.jsonl", [{"prompt": [0] * 10_000}])
    with pytest.raises(ConfigError) as caught:
        validate_prompts_file(path, source(path))
    assert len(str(caught.value)) < 300


def test_a_missing_or_empty_file_is_the_users_error(tmp_path: Path) -> None:
    empty = write_lines(tmp_path / "empty.jsonl", [])
    with pytest.raises(ConfigError, match="holds no prompt"):
        validate_prompts_file(empty, source(empty))
    with pytest.raises(ConfigError, match=r"gone.jsonl: cannot read"):
        validate_prompts_file(tmp_path / "gone.jsonl", source(empty))


def test_prompts_keep_their_order_and_line_and_their_id_is_their_content(tmp_path: Path) -> None:
    lines = [
        {"prompt": "1+1?"},
        {"messages": [{"content": "2+2?", "role": "user", "weight": 3}]},
        {"prompt": "é\u2028ü"},
    ]
    out = tmp_path / "out"
    outputs = run_prompts(write_lines(tmp_path / "source.jsonl", lines), out)
    rows = read_rows(out / "prompts.parquet", PROMPTS)
    assert [row["line"] for row in rows] == [1, 2, 3]
    assert [row["source"] for row in rows] == ["numbers"] * 3
    assert json.loads(rows[1]["messages"]) == [ASK]
    assert rows[1]["id"] == digest([ASK]) == messages_id([ASK])
    assert outputs.files == ["prompts.parquet"]
    assert outputs.counts.model_dump() == {"total": 3, "ok": 3, "error": 0, "skipped": 0, "reasons": {}}


def test_the_system_message_comes_first_and_only_once(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "source.jsonl", [{"messages": [ASK]}])
    run_prompts(path, tmp_path / "out", system="Be brief.")
    (row,) = read_rows(tmp_path / "out" / "prompts.parquet", PROMPTS)
    messages = json.loads(row["messages"])
    assert messages == [{"role": "system", "content": "Be brief."}, ASK]
    assert row["id"] != messages_id([ASK])
    assert question_id(messages) == messages_id([ASK])
    both = write_lines(tmp_path / "both.jsonl", [{"messages": messages}])
    with pytest.raises(ConfigError, match=r"both.jsonl:1: `messages\[0\]` is a system message"):
        validate_prompts_file(both, source(both, system="Be long."))


def test_the_same_prompt_twice_is_kept_once_and_counted(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "source.jsonl", [{"prompt": "2+2?"}, {"prompt": "3+3?"}, {"messages": [ASK]}])
    outputs = run_prompts(path, tmp_path / "out")
    assert [row["line"] for row in read_rows(tmp_path / "out" / "prompts.parquet", PROMPTS)] == [1, 2]
    assert (outputs.counts.total, outputs.counts.ok, outputs.counts.skipped) == (3, 2, 1)
    assert outputs.counts.reasons == {"duplicate": 1}
    assert outputs.counts.balanced()
    assert validate_prompts_file(path, source(path)) == 2


def test_the_limit_takes_the_first_distinct_prompts(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "source.jsonl", [{"prompt": text} for text in "aabc"])
    outputs = run_prompts(path, tmp_path / "out", limit=2)
    assert [row["line"] for row in read_rows(tmp_path / "out" / "prompts.parquet", PROMPTS)] == [1, 3]
    assert outputs.counts.balanced()
    assert validate_prompts_file(path, source(path, limit=2)) == 2


def test_other_field_names_are_read_when_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "source.jsonl", [{"question": "a"}, {"chat": [ASK]}])
    assert validate_prompts_file(path, source(path, prompt_field="question", messages_field="chat")) == 2


def test_a_byte_order_mark_windows_line_ends_and_a_missing_last_newline_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "source.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}')
    assert validate_prompts_file(path, source(path)) == 2


def test_a_file_that_changed_since_the_plan_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "source.jsonl", [{"prompt": "a"}])
    params = source(path)
    write_lines(path, [{"prompt": "b"}])
    with pytest.raises(PermanentError, match="changed since the run was planned"):
        prompts.run(params, Inputs({}, {params.digest: path}), tmp_path, HostContext())
    with pytest.raises(PermanentError, match="not handed to the stage"):
        prompts.run(params, Inputs({}), tmp_path, HostContext())


def test_the_same_content_gives_the_same_bytes_wherever_it_lies(tmp_path: Path) -> None:
    lines = [{"prompt": f"{number}?"} for number in range(ROW_GROUP + 5)]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        run_prompts(write_lines(tmp_path / name / f"{name}.jsonl", lines), tmp_path / name)
    one, two = ((tmp_path / name / "prompts.parquet").read_bytes() for name in ("one", "two"))
    assert one == two


def test_validating_needs_neither_torch_nor_pyarrow() -> None:
    code = "import sys, dflash.data.prompts; print({'torch', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
