"""The folder of a comparison: finished records, and beside them what was finished of the others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from pydantic import ValidationError

from kvatlas.errors import UserError
from kvatlas.measure.files import write_whole
from kvatlas.measure.record import Record, key, read_records, write_record
from kvatlas.measure.sample import Sample
from kvatlas.measure.schema import Quality
from kvatlas.study.plan import Plan


class Store:
    """Records in ``plan.out``; samples and quality of unfinished ones in ``plan.out/.partial``."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.partial = plan, plan.out / ".partial"
        self.keys = {written: key(s.name, plan.asked()) for written, s in plan.strategies.items()}
        self.warnings: list[str] = []

    def open(self) -> None:
        """Make the folders."""
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {self.plan.out} cannot be written ({error.strerror or error})") from error

    def records(self) -> dict[str, Record]:
        """Finished records of this plan's strategies. A record that cannot be read counts as missing."""
        if not self.plan.out.is_dir():
            return {}
        found = read_records(self.plan.out)
        self.warnings = found.warnings
        by_key = {record.key: record for record in found.records}
        return {written: by_key[name] for written, name in self.keys.items() if name in by_key}

    def samples(self, written: str) -> dict[int, Sample]:
        """Repeats that were finished, by number: those inside a record, and those of a run that was cut short."""
        known = self.records().get(written)
        texts = [] if known is None else [json.dumps(data) for data in known.repeats]
        texts += [file.read_text() for file in sorted(self.partial.glob(f"{self._stem(written)}.[0-9]*.json"))]
        kept = [sample for one in texts if (sample := _sample(one)) is not None]
        return {sample.repeat: sample for sample in kept if sample.status == "ok"}

    def keep_sample(self, written: str, sample: Sample) -> None:
        """Write one finished repeat."""
        write_whole(self.partial / f"{self._stem(written)}.{sample.repeat}.json", sample.model_dump_json())

    def quality(self, written: str) -> Quality | None:
        """What was measured of its quality before."""
        known = self.records().get(written)
        if known is not None and known.quality is not None:
            return known.quality
        try:
            return Quality.model_validate_json(self._quality_file(written).read_bytes())
        except (OSError, ValidationError):
            return None

    def keep_quality(self, written: str, quality: Quality) -> None:
        """Into the record if there is one, else beside it until there is."""
        known = self.records().get(written)
        if known is None:
            write_whole(self._quality_file(written), quality.model_dump_json())
        else:
            self.finish(written, known.model_copy(update={"quality": quality}))

    def finish(self, written: str, record: Record) -> None:
        """Write the record; what was kept of it in parts is not needed any more."""
        write_record(self.plan.out / self.keys[written], record)
        for file in self.partial.glob(f"{self._stem(written)}.*.json"):
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder for parts when nothing is in it."""
        if self.partial.is_dir() and not any(self.partial.iterdir()):
            shutil.rmtree(self.partial, ignore_errors=True)

    def _stem(self, written: str) -> str:
        return self.keys[written].removesuffix(".json")

    def _quality_file(self, written: str) -> Path:
        return self.partial / f"{self._stem(written)}.quality.json"


def _sample(text: str) -> Sample | None:
    try:
        return Sample.model_validate_json(text)
    except ValidationError:
        return None
