"""Records: the schema, the figures, names that are stable, files that are whole or not there."""

from __future__ import annotations

import json
import math
import os

import pytest
from pydantic import ValidationError
from report_records import POINTS, failed, record, study

from kvatlas.errors import UserError
from kvatlas.measure.record import Figure, Record, Tier, key, read_records, wilson, write_record


def test_round_trip(tmp_path):
    records = {one.key: one for one in [*study(), failed(), failed("x", "timeout", "over 600 s")]}
    for name, one in records.items():
        write_record(tmp_path / name, one)
    found = read_records(tmp_path)
    assert not found.warnings
    assert {one.key: one for one in found.records} == records
    assert not [name for name in os.listdir(tmp_path) if not name.endswith(".json")]


def test_json_is_strict_with_infinities(tmp_path):
    quality = record().quality.model_copy(update={"perplexity": Figure.exact(math.inf, "ppl")})
    path = tmp_path / "a.json"
    write_record(path, record(quality=quality))
    json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert read_records(tmp_path).records[0].quality.perplexity.value == math.inf


def test_key_is_stable_and_tells_what_was_asked():
    asked = {"batch": 4, "model": "smollm2"}
    assert key("h2o:0.3", asked) == key("h2o:0.3", dict(reversed(asked.items()))) == "h2o-0.3-874799d6545b.json"
    assert len({key("h2o:0.3", asked), key("h2o:0.5", asked), key("h2o:0.3", {**asked, "batch": 8})}) == 3
    assert "/" not in key("../../etc/passwd\n" * 9, asked) and len(key("x" * 999, asked)) < 64
    assert key("???", {}).startswith("strategy-")
    assert record("h2o:0.3").key == key("h2o:0.3", record().asked)


def test_figures():
    three = Figure.of([3.0, 1.0, 2.0], "s")
    assert (three.value, three.low, three.high, three.n, three.interval) == (2.0, 1.0, 3.0, 3, "min-max")
    assert Figure.of([1.0], "s").interval is None
    mean = Figure.mean([1.0, 2.0, 3.0], "nats", kind="modelled")
    assert (mean.value, mean.kind) == (2.0, "modelled") and mean.high - mean.value == pytest.approx(1 / math.sqrt(3))
    assert Figure.mean([math.inf, 1.0], "nats").low is None
    with pytest.raises(ValueError, match="at least one"):
        Figure.of([], "s")
    with pytest.raises(ValidationError, match="come together"):
        Figure(value=1, unit="s", low=0)


def test_wilson():
    assert wilson(14, 24) == pytest.approx((0.3883, 0.7553), abs=1e-3)
    assert wilson(0, 24)[0] == 0 and wilson(24, 24)[1] == 1
    assert Figure.proportion(14, 24).low < 14 / 24 < Figure.proportion(14, 24).high
    with pytest.raises(ValueError):
        wilson(3, 2)


def test_a_record_is_ok_or_says_why():
    with pytest.raises(ValidationError, match="says in `error` why"):
        record(status="failed")
    with pytest.raises(ValidationError, match="says in `error` why"):
        record(error="but ok")
    with pytest.raises(ValidationError):
        Record(**{**record().model_dump(), "surprise": 1})
    assert Tier(payload=3, metadata=2, padding=1).held == 6


def test_foreign_files_are_ignored_and_bad_records_named(tmp_path):
    write_record(tmp_path / record().key, record())
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "package.json").write_text('{"name": "mine"}')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / ".half.json").write_text("{")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "h2o-0.3-0123456789ab.json").write_text('{"format": "kvatlas-rec')
    old = json.loads(record().model_dump_json())
    (tmp_path / "old.json").write_text(json.dumps({**old, "schema_version": 0}))
    (tmp_path / "wrong.json").write_text(json.dumps({**old, "status": "fine"}))
    found = read_records(tmp_path)
    assert [one.strategy.asked for one in found.records] == ["full"]
    assert len(found.warnings) == 3
    for file, why in (("h2o-0.3-", "not valid JSON"), ("old.json", "schema version 0"), ("wrong.json", "status")):
        assert any(file in line and why in line for line in found.warnings)


def test_folders_that_cannot_be_used_are_user_errors(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(UserError, match=folder.name):
            read_records(folder)
        with pytest.raises(UserError, match="cannot write"):
            write_record(folder / "a.json", record())


def test_a_failed_write_leaves_the_old_record(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_record(path, record("full"))

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(UserError, match="No space left"):
        write_record(path, record("paged"))
    assert os.listdir(tmp_path) == ["a.json"]
    assert read_records(tmp_path).records[0].strategy.asked == "full"


def test_every_synthetic_strategy_has_a_file_of_its_own():
    assert len({one.key for one in study()}) == len(POINTS)
