"""The demo's extra row: FedNN's last models, tested with the statistics of test batches."""

from __future__ import annotations

import fednorms as fn
from examples.demo import add_batch_statistics


def test_fednn_has_a_row_with_batch_statistics_and_a_sentence_where_it_falls_less(tmp_path):
    recipe = fn.Recipe(data={"size": 8}, training={"steps": 1}, rounds=2)
    comparison = fn.compare(["fedavg", "fednn"], seeds=1, recipe=recipe, out=tmp_path)
    add_batch_statistics(comparison, tmp_path, before=1)
    rows = {(row.label, row.mode): row.entries["mean"].mean for row in comparison.rows}
    assert set(rows) == {("fedavg", "global/global"), ("fednn", "global/global"), ("fednn", "global/batch")}
    modes = ["global", "global/batch"]
    first, last = (fn.evaluate_run(tmp_path / "fednn-0", modes, which=which) for which in (1, 2))
    assert abs(rows["fednn", "global/batch"] - last["global/batch/test"].mean) < 1e-9
    fall = {mode: first[mode].mean - last[mode].mean for mode in last}
    said = [note for note in comparison.notes if "prefer batch statistics" in note]
    assert bool(said) is (fall["global/global/test"] > max(0.0, fall["global/batch/test"]))
    for note in said:
        assert f"lost {100 * fall['global/global/test']:.1f} points" in note
