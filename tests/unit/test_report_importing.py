"""`dflash import`: what was made elsewhere comes in with what it proves, and all else is asserted, for ever."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file

from dflash.base.errors import ConfigError, CorruptError, PermanentError
from dflash.base.records import ImportRecord
from dflash.report.compare import compare, render
from dflash.report.importing import import_path, parse_argv
from dflash.report.inspect import show

WEIGHTS = {
    "layers.0.mlp.weight": torch.ones(2, 3),
    "layers.1.mlp.weight": torch.zeros(2, 3),
    "fc.weight": torch.ones(3),
}


def brought(tmp_path: Path, path: Path, **said: Path) -> tuple[ImportRecord, Path]:
    record = import_path(path, tmp_path / "results", **said)  # type: ignore[arg-type]
    folder = tmp_path / "results/store/imported" / record.key
    assert ImportRecord.read(folder / "import.json") == record
    return record, folder


def test_an_old_pt_checkpoint_becomes_safetensors_and_its_values_are_asserted(tmp_path: Path) -> None:
    wrapped = {f"module.{name}": tensor for name, tensor in WEIGHTS.items()}
    path = tmp_path / "epoch_3.pt"
    torch.save({"model": wrapped, "args": {"lr": 6e-4, "token_budget": 65536}, "step": 1200}, path)
    record, folder = brought(tmp_path, path)
    with safe_open(folder / "drafter/model.safetensors", framework="pt") as stream:
        assert set(stream.keys()) == set(WEIGHTS)
        assert torch.equal(stream.get_tensor("fc.weight"), WEIGHTS["fc.weight"])
    assert record.proven == {"tensors": 3, "bytes": 60, "num_draft_layers": 2}
    said = record.asserted["train"]["lr"]
    assert (said.value, said.said_by, said.standing) == (6e-4, "epoch_3.pt", "asserted")
    assert record.asserted["buckets"]["token_budget"].value == 65536
    text = show(folder, everything=False)
    assert "asserted, nothing proves it: " in text
    assert "lr: 0.0006" in text


class Runs:
    """What a hostile pickle holds."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran"),))


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": WEIGHTS, "evil": Runs()}, tmp_path / "old.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Runs()))
    for name in ("old.pt", "plain.pt"):
        with pytest.raises((PermanentError, CorruptError), match=name):
            import_path(tmp_path / name, tmp_path / "results")
    assert not (tmp_path / "ran").exists()
    assert list((tmp_path / "results/store/imported").iterdir()) == []


def test_a_drafters_folder_keeps_its_bytes_and_its_config_is_asserted(tmp_path: Path) -> None:
    source = tmp_path / "theirs"
    source.mkdir()
    save_file(WEIGHTS, source / "model.safetensors")
    config = {"block_size": 16, "num_hidden_layers": 2, "dflash_config": {"target_layer_ids": [1, 3]}}
    (source / "config.json").write_text(json.dumps(config))
    record, folder = brought(tmp_path, source)
    assert (folder / "drafter/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert {name: item.value for name, item in record.asserted["train"].items()} == {
        "block_size": 16,
        "num_draft_layers": 2,
        "target_layer_ids": [1, 3],
    }


def test_a_wandb_config_and_a_command_line_say_what_the_checkpoint_cannot(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(WEIGHTS, path)
    wandb = tmp_path / "config.yaml"
    wandb.write_text(
        yaml.safe_dump(
            {"_wandb": {"value": {}}, "learning_rate": {"desc": None, "value": 6e-4}, "api_key": {"value": "x"}}
        )
    )
    argv = tmp_path / "launch.sh"
    argv.write_text(
        "WANDB_API_KEY=abc torchrun train.py --token-budget 65536 \\\n --num-anchors=512 --hf-token hf_abc --muon"
    )
    record, _ = brought(tmp_path, path, wandb_config=wandb, argv=argv)
    assert record.asserted["train"]["lr"].said_by == "config.yaml"
    assert record.asserted["train"]["max_anchors"].value == 512
    assert record.asserted["buckets"]["token_budget"].said_by == "launch.sh"
    assert record.asserted["other"]["muon"].value is True
    written = (tmp_path / "results/store/imported" / record.key / "import.json").read_text()
    assert not any(secret in written for secret in ("hf_abc", "api_key", "hf-token", "abc torchrun"))


SAID: dict[str, Any] = {
    **dict.fromkeys(("wandb-key", "swanlab-key", "auth", "passwd", "api_tokens", "db.pwd", "apiKey"), "hush"),
    "hub": {"password": "hush", "user": "ada"},
    "wandb": {"key": "hush", "mode": "online"},
    "loggers": [{"bearer": "hush", "name": "x"}],
}


def test_secrets_are_never_written_however_they_are_named_or_nested(tmp_path: Path) -> None:
    plain = {"max_new_tokens": 5, "mask_token_id": 3, "tokenizer": "t", "num_tokens": 9, "num_key_value_heads": 2}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**SAID, **plain, "token_budget": 7, "author": "ada"}))
    record, folder = brought(tmp_path, config)
    torch.save({"model": WEIGHTS, "args": SAID, "credentials": {"value": "hush"}}, tmp_path / "old.pt")
    _, other = brought(tmp_path, tmp_path / "old.pt")
    assert not any("hush" in (path / "import.json").read_text() for path in (folder, other))
    said = record.asserted["other"]
    assert (said["hub"].value, said["wandb"].value) == ({"user": "ada"}, {"mode": "online"})
    assert said["loggers"].value == [{"name": "x"}]
    everything = {name: item.value for part in record.asserted.values() for name, item in part.items()}
    assert everything.items() >= {**plain, "token_budget": 7, "author": "ada"}.items()


def test_an_assertion_that_the_weights_disprove_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(WEIGHTS, path)
    argv = tmp_path / "launch.txt"
    argv.write_text("train --num-draft-layers 5")
    with pytest.raises(ConfigError, match=r"launch.txt says num_draft_layers 5, the weights have 2"):
        import_path(path, tmp_path / "results", argv=argv)


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "arrow"])
def test_a_tokenised_dataset_is_counted_and_its_lengths_are_proven(tmp_path: Path, kind: str) -> None:
    rows = [{"input_ids": list(range(length)), "loss_mask": [0] * 2 + [1] * (length - 2)} for length in (4, 6, 8, 10)]
    path = tmp_path / f"data.{kind}"
    table = pa.Table.from_pylist(rows)
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    record, folder = brought(tmp_path, path)
    assert record.proven["samples"] == 4
    assert record.proven["tokens"] == 28
    assert record.proven["trainable_tokens"] == 20
    assert record.proven["length"]["mean"] == 7.0
    assert pq.read_table(folder / "data/samples.parquet").column("prompt_length").to_pylist() == [2, 2, 2, 2]
    assert "4 training samples, 28 tokens" in show(folder, everything=False)


def test_a_dataset_without_a_mask_is_refused_with_its_columns(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"input_ids": [1, 2]}\n')
    with pytest.raises(ConfigError, match=r"the columns are input_ids.*loss_mask"):
        import_path(tmp_path / "data.jsonl", tmp_path / "results")


def test_importing_the_same_again_is_the_same_entry(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(WEIGHTS, path)
    assert brought(tmp_path, path)[0] == brought(tmp_path, path)[0]
    assert len(list((tmp_path / "results/store/imported").iterdir())) == 1


def test_assertions_stay_asserted_in_a_comparison(tmp_path: Path) -> None:
    for name, rate in (("a", "1e-3"), ("b", "2e-3")):
        (tmp_path / f"{name}.txt").write_text(f"train --lr {rate}")
    folders = [brought(tmp_path, tmp_path / f"{name}.txt")[1] for name in ("a", "b")]
    text = render(compare(*folders))
    assert "lr: 0.001 -> 0.002  (asserted (a.txt) -> asserted (b.txt))" in text


def test_an_edited_record_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("train --lr 1e-3")
    folder = brought(tmp_path, tmp_path / "a.txt")[1]
    path = folder / "import.json"
    path.write_text(path.read_text().replace("0.001", "0.5"))
    with pytest.raises(CorruptError, match="edited after it was written"):
        show(folder, everything=False)


def test_a_command_line_is_read_option_by_option() -> None:
    assert parse_argv("python x.py --a 1 --b=2.5 --flag --name 'two words' -c 3") == {
        "a": 1,
        "b": 2.5,
        "flag": True,
        "name": "two words",
    }
