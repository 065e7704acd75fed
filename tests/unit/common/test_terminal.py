"""What commands print where there is no terminal."""

import logging

from tba.common.terminal import training_progress


def test_a_log_has_about_twenty_steps_of_a_training_and_those_with_a_held_out_loss(caplog):
    caplog.set_level(logging.INFO)
    with training_progress(as_json=False) as report:
        for step in range(1, 314):
            report({"step": step, "steps": 313, "loss": 1.0} | ({"held_out_loss": 2.0} if step == 50 else {}))
    logged = [record.fields["step"] for record in caplog.records]
    assert logged == [1, *range(15, 50, 15), 50, *range(60, 313, 15), 313]
