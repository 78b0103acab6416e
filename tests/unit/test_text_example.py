"""examples/text.py: the text is split, the rate follows its schedule, learners train and save the mean."""

import json
from pathlib import Path

import pytest
import torch

from examples import text as script
from tests.launcher import run_learners

ROOT = Path(__file__).parents[2]


def test_nothing_held_out_is_trained_on(tmp_path: Path) -> None:
    one, other = tmp_path / "a.txt", tmp_path / "b.txt"
    one.write_bytes(b"a" * 949)
    other.write_bytes(b"b" * 50)  # and a line break between the files
    text = script.Text([one, other], 8)
    assert bytes(text.train.tolist()) == b"a" * 949 + b"\n"
    assert bytes(text.held_out.tolist()) == b"b" * 50
    inputs, labels = text.batch(text.train, 200, torch.Generator().manual_seed(0))
    assert inputs.shape == labels.shape == (200, 8)
    assert not (labels == ord("b")).any()
    assert torch.equal(inputs[:, 1:], labels[:, :-1])


def test_the_next_byte_is_predicted_from_those_before_only() -> None:
    torch.manual_seed(0)
    model = script.GPT(32, 2, 8)
    x = torch.randint(256, (1, 8))
    y = x.clone()
    y[0, 5] = (y[0, 5] + 1) % 256
    difference = (model(x) - model(y)).abs().amax(-1)[0]
    assert (difference[:5] == 0).all()
    assert (difference[5:] > 0).all()


def test_the_rate_warms_up_and_falls_to_a_tenth() -> None:
    model = script.GPT(32, 1, 8)
    optimizer = script.adamw(model, 0.1)
    vectors = {id(p) for p in model.parameters() if p.dim() <= 1}
    assert {id(p) for p in optimizer.param_groups[1]["params"]} == vectors
    scheduler = script.cosine(optimizer, 10, 110)
    rates = []
    for _ in range(111):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[:10] == pytest.approx([0.01 * i for i in range(1, 11)])
    assert rates[60] == pytest.approx(0.055)
    assert rates[110] == pytest.approx(0.01)


@pytest.mark.mpi
def test_four_learners_train_and_save_the_mean(tmp_path: Path) -> None:
    out = tmp_path / "out"
    small = ["--width", "32", "--layers", "1", "--length", "16", "--batch", "4", "--warm-up", "5"]
    args = [*small, "--out", str(out), "--steps", "20", "--every", "10", "--passes", "2"]
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2"}
    result = run_learners(4, ROOT / "examples" / "text.py", args=args, env=env)
    assert result.returncode == 0, result.report()
    entries = [json.loads(line) for line in (out / "heldout.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [0, 10, 20]
    losses = [entry["held_out"] for entry in entries]
    print(losses)
    assert losses[2] < losses[0] - 0.3  # falls by 2.4
    model = script.GPT(32, 1, 16)
    model.load_state_dict(torch.load(out / "model.pt", weights_only=True))
    text = script.Text(None, 16)
    cast = script.autocast(torch.device("cpu"))
    saved = script.held_out(model, text, cast, torch.device("cpu"))
    assert saved == pytest.approx(entries[2]["held_out"], abs=1e-3)
