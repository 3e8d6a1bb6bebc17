"""The demo's extra row: FedNN's last models, tested with the statistics of test batches."""

from __future__ import annotations

import fednorms as fn
from examples.demo import add_batch_statistics


def test_fednn_has_a_row_with_batch_statistics_and_a_sentence_where_it_is_better(tmp_path):
    recipe = fn.Recipe(data={"size": 8}, training={"steps": 1}, rounds=1)
    comparison = fn.compare(["fedavg", "fednn"], seeds=1, recipe=recipe, out=tmp_path)
    add_batch_statistics(comparison, tmp_path)
    rows = {(row.label, row.mode): row.entries["mean"].mean for row in comparison.rows}
    assert set(rows) == {("fedavg", "global/global"), ("fednn", "global/global"), ("fednn", "global/batch")}
    again = fn.evaluate_run(tmp_path / "fednn-0", ["global/batch"])["global/batch/test"]
    assert abs(rows["fednn", "global/batch"] - again.mean) < 1e-9
    better = rows["fednn", "global/batch"] > rows["fednn", "global/global"]
    assert any("prefer batch statistics" in note for note in comparison.notes) is better
