"""Quality cells as files: named by what was asked, beside other records, never lost to one bad file."""

from __future__ import annotations

import json
import math

import pytest
from quality_records import KL, battery, cell, failed
from report_records import study

from kvatlas.errors import UserError
from kvatlas.measure.record import read_records, write_record
from kvatlas.quality.cells import cell_name, name_of, read_cells, write_cell


def test_cells_come_back_as_they_were(tmp_path):
    records = [*battery(5), failed()]
    for record in records:
        write_cell(tmp_path / "new" / "folder", record)
    found = read_cells(tmp_path / "new" / "folder")
    assert not found.warnings and len(found.records) == len(records)
    assert sorted(map(name_of, found.records)) == sorted(set(map(name_of, records)))
    assert next(r for r in found.records if name_of(r) == name_of(records[0])) == records[0]
    assert not [path for path in (tmp_path / "new" / "folder").iterdir() if path.suffix != ".json"]


def test_infinite_values_survive(tmp_path):
    record = cell("h2o", 0.3, "x", {"kl": [math.inf, 1.0]}, metrics=[KL])
    write_cell(tmp_path, record)
    assert read_cells(tmp_path).records == [record]


def test_a_cell_is_written_over_and_others_are_not(tmp_path):
    path = write_cell(tmp_path, cell("h2o", 0.3, "x", {"acc": [1, 0]}))
    assert write_cell(tmp_path, cell("h2o", 0.3, "x", {"acc": [1, 1]})) == path
    others = [
        cell("h2o", 0.2, "x", {"acc": [1, 0]}), cell("h2o", 0.3, "y", {"acc": [1, 0]}),
        cell("h2o", 0.3, "x", {"acc": [1, 0]}, parameters={"shots": 5}), cell("h2o", 0.3, "x", {"acc": [1, 0, 0]}),
        cell("h2o", 0.3, "x", {"acc": [1, 0]}, seed=1), cell("h2o", 0.3, "x", {"acc": [1, 0]}, dtype="bfloat16"),
    ]  # fmt: skip
    model = others[0].model
    others += [cell("h2o", 0.3, "x", {"acc": [1, 0]}, model=model.model_copy(update={part: "other"}))
               for part in ("name", "weights", "stored")]  # fmt: skip
    assert len({path, *(write_cell(tmp_path, record) for record in others)}) == 1 + len(others)
    first = read_cells(tmp_path).records
    assert sum(record.figures["acc"].value == 1.0 for record in first) == 1


def test_the_name_is_known_before_the_run(tmp_path):
    record = cell("h2o", 0.3, "x", {"acc": [1, 0]})
    name = cell_name("h2o:0.3", record.task, record.model, "float32")
    assert write_cell(tmp_path, record).name == name and name.startswith("x-h2o-0.3-")
    slower = record.model_copy(update={"threads": 1, "seconds": 99.0})
    assert name_of(slower) == name


def test_cells_and_records_of_compare_share_a_folder(tmp_path):
    for record in study():
        write_record(tmp_path / record.key, record)
    cells = [cell("h2o", 0.3, "x", {"acc": [1, 0]}), failed()]
    for one in cells:
        write_cell(tmp_path, one)
    (tmp_path / "report.html").write_text("<p>")
    (tmp_path / "other.json").write_text("[1")
    (tmp_path / ".hidden.json").write_text("{")
    (tmp_path / "folder.json").mkdir()
    found, compared = read_cells(tmp_path), read_records(tmp_path)
    assert not found.warnings and not compared.warnings
    assert len(found.records) == 2 and len(compared.records) == len(study())


def test_broken_files_are_named_and_the_others_read(tmp_path):
    good = write_cell(tmp_path, cell("h2o", 0.3, "x", {"acc": [1, 0]}))
    data = json.loads(good.read_text())
    (tmp_path / "x-cut-0123456789ab.json").write_text(good.read_text()[:50])
    (tmp_path / "x-new.json").write_text(json.dumps({**data, "version": 2}))
    (tmp_path / "x-lacks.json").write_text(json.dumps({key: data[key] for key in data if key != "family"}))
    del data["samples"][1]["metrics"]
    (tmp_path / "x-sample.json").write_text(json.dumps(data))
    found = read_cells(tmp_path)
    assert len(found.records) == 1
    for name, why in (
        ("x-cut-0123456789ab.json", "is not valid JSON"), ("x-new.json", "has version 2, this kvatlas reads 1"),
        ("x-lacks.json", "family: Field required"), ("x-sample.json", "samples.1.metrics: Field required"),
    ):  # fmt: skip
        assert any(name in line and why in line for line in found.warnings), why
    assert len(found.warnings) == 4


def test_no_such_folder(tmp_path):
    with pytest.raises(UserError, match="cannot read records"):
        read_cells(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the record"):
        write_cell(tmp_path / "file" / "below", cell("h2o", 0.3, "x", {"acc": [1, 0]}))
