"""RBM pre-training: the loss against contrastive divergence by hand, the guard, and the whole road."""

import itertools
import json
import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from examples.acoustic_model.speech.model import FeedForward, Shape, make, preset, windows  # noqa: E402
from examples.acoustic_model.speech.rbm import RBM  # noqa: E402


def machine(gaussian: bool, visible: int = 5, hidden: int = 4, seed: int = 3) -> RBM:
    torch.manual_seed(seed)
    rbm = RBM(visible, hidden, gaussian).double()
    with torch.no_grad():
        for parameter in rbm.parameters():
            parameter.normal_(0, 0.5)
    return rbm


@pytest.mark.parametrize("gaussian", [True, False])
def test_the_gradient_of_the_loss_is_contrastive_divergence(gaussian: bool) -> None:
    rbm = machine(gaussian)
    v = torch.rand(7, 5, dtype=torch.double)
    back = rbm.reconstruct(v, torch.Generator().manual_seed(1))
    rbm.contrastive(v, back).backward()
    with torch.no_grad():
        up, down = rbm(v), rbm(back)
        weight = (up.t() @ v - down.t() @ back) / 7
    torch.testing.assert_close(rbm.weight.grad, -weight)
    torch.testing.assert_close(rbm.bias.grad, -(up - down).mean(0))
    torch.testing.assert_close(rbm.visible_bias.grad, -(v - back).mean(0))


@pytest.mark.parametrize("gaussian", [True, False])
def test_free_energy_sums_over_all_hidden_states(gaussian: bool) -> None:
    rbm = machine(gaussian)
    v = torch.rand(3, 5, dtype=torch.double)
    states = torch.tensor(list(itertools.product((0.0, 1.0), repeat=4)), dtype=torch.double)
    coupling = states @ rbm.weight @ v.t() + (states @ rbm.bias)[:, None]
    own = v @ rbm.visible_bias
    if gaussian:
        own = -(v - rbm.visible_bias).square().sum(1) / 2
    torch.testing.assert_close(rbm.free_energy(v), -torch.logsumexp(coupling + own, 0))


def test_hidden_units_are_sampled_and_visible_ones_are_not() -> None:
    rbm = machine(gaussian=False)
    v = torch.rand(1, 5, dtype=torch.double).expand(20_000, 5)
    back = rbm.reconstruct(v, torch.Generator().manual_seed(0))
    assert len(back.unique(dim=0)) == 16, "as many as there are states of 4 hidden units"
    states = torch.tensor(list(itertools.product((0.0, 1.0), repeat=4)), dtype=torch.double)
    p = rbm(v[:1])
    weights = (states * p + (1 - states) * (1 - p)).prod(1)
    expected = (weights[:, None] * rbm.back(states)).sum(0)
    torch.testing.assert_close(back.mean(0), expected, atol=0.01, rtol=0)


def test_a_visible_bias_starts_where_the_unit_is_as_often_on_as_its_data() -> None:
    rbm = RBM(3, 2, gaussian=False, mean=torch.tensor([0.25, 0.0, 1.0]))
    on = rbm.back(torch.zeros(1, 2))[0]
    torch.testing.assert_close(on, torch.tensor([0.25, 1e-4, 1 - 1e-4]))
    assert rbm.bias.abs().max() == 0
    assert math.isclose(RBM(400, 400, True).weight.std().item(), 0.1, rel_tol=0.02)


def test_a_window_shows_the_frames_around_each_frame() -> None:
    shape = Shape(layers=1, hidden=2, projection=0, outputs=3, inputs=2, kind="dnn", context=1)
    frames = torch.arange(5.0)[None, :, None].expand(1, 5, 4) + torch.tensor([0, 0.1, 9, 9])
    seen = windows(frames, shape)
    assert seen.shape == (1, 3, 6)
    torch.testing.assert_close(seen[0, 1].reshape(2, 3)[0], torch.tensor([1.0, 2.0, 3.0]))


def test_presets_of_the_dnn() -> None:
    model = make(preset("dnn", outputs=11))
    assert isinstance(model, FeedForward)
    assert model(torch.zeros(3, 21 + 10, 120)).shape == (3, 21, 11)
    with torch.device("meta"):
        paper = make(preset("dnn-paper", outputs=1))
    assert [tuple(layer.weight.shape) for layer in paper.hidden] == [(2048, 440)] + [
        (2048, 2048)
    ] * 5


for needed in ("espeakng_loader", "kaldi_native_fbank", "scipy", "tqdm", "tensorboard"):
    pytest.importorskip(needed)

import dataclasses  # noqa: E402

from examples.acoustic_model import decode, prepare_data, pretrain_rbm  # noqa: E402
from examples.acoustic_model import train as script  # noqa: E402
from examples.acoustic_model.speech import alone, corpus, journal  # noqa: E402
from examples.acoustic_model.speech.problem import Problem  # noqa: E402
from examples.acoustic_model.speech.tasks import TASKS  # noqa: E402

TINY = dataclasses.replace(
    TASKS["easy"], train_hours=0.02, dev_hours=0.004, test_hours=0.002, state_frames=30
)


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech") / "data"
    prepare_data.prepare(TINY, folder, jobs=2, quiet=True)
    return folder


def pretrained(speech: Path, out: Path, *more: str) -> list[dict]:
    arguments = ["--strategy", "single", "--data", str(speech), "--out", str(out)]
    options = pretrain_rbm.arguments([*arguments, "--layers", "2", "--hidden", "32", *more])
    out.mkdir(exist_ok=True)
    shape = dataclasses.replace(preset("dnn", 1), layers=options.layers, hidden=options.hidden)
    split = corpus.Split(speech, "train", shape.context)
    generator = torch.Generator().manual_seed(0)
    stack = pretrain_rbm.pretrain(pretrain_rbm.Job(alone, options, shape, split, generator))
    layers = [{"weight": m.weight.detach(), "bias": m.bias.detach()} for m in stack]
    journal.save(out / "stack.pt", {"layers": layers})
    return [json.loads(line) for line in (out / "monitor.jsonl").read_text().splitlines()]


def test_a_machine_that_diverges_says_so(speech: Path, tmp_path: Path) -> None:
    with pytest.raises(Problem, match="layer 2 diverged: .* lower --lr"):
        pretrained(speech, tmp_path, "--lr", "1000", "--l2", "1", "--epochs", "3")


def test_a_dnn_is_fine_tuned_from_a_pretrained_stack(speech: Path, tmp_path: Path) -> None:
    entries = pretrained(speech, tmp_path / "rbm", "--first-epochs", "4", "--epochs", "3")
    first = [entry["error"] for entry in entries if entry["layer"] == 1]
    second = [entry["error"] for entry in entries if entry["layer"] == 2]
    for errors in (first, second):
        assert errors == sorted(errors, reverse=True), "reconstruction errors fall"
    assert first[-1] < 0.7 * first[0]
    assert [(e["layer"], e["guarded"]) for e in entries] == [(1, 0)] * 4 + [(2, 0)] * 3
    command = ["--strategy", "single", "--data", str(speech), "--out", str(tmp_path), "--seed", "1"]
    command += ["--preset", "dnn", "--layers", "2", "--hidden", "32", "--epochs", "1"]
    options = script.arguments([*command, "--init", str(tmp_path / "rbm" / "stack.pt")])
    trainer = script.Trainer(alone, options)
    stack = journal.load(tmp_path / "rbm" / "stack.pt")["layers"]
    for mine, theirs in zip(trainer.model.hidden, stack, strict=True):
        assert torch.equal(mine.weight, theirs["weight"]) and torch.equal(mine.bias, theirs["bias"])
    script.train(alone, options)
    assert decode.decode(tmp_path / "model.pt", speech)["words"] > 0
    with pytest.raises(Problem, match="--init .*32.*16"):
        wrong = script.arguments([*command[:-4], "--hidden", "16", "--init", str(options.init)])
        script.Trainer(alone, wrong)


def test_the_guard_holds_a_machine_that_runs_away(
    speech: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate far too high: without the guard the reconstructions grow without bound."""
    steps = []

    def counted(optimizer, named_parameters):
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        return optimizer

    monkeypatch.setattr(alone, "DistributedOptimizer", counted)
    entries = pretrained(
        speech, tmp_path, "--first-lr", "3", "--first-epochs", "3", "--layers", "1"
    )
    assert sum(entry["guarded"] for entry in entries) > 0
    assert all(math.isfinite(entry["error"]) for entry in entries)
    assert entries[-1]["error"] < 10
    assert len(steps) == 3 * (len(corpus.Split(speech, "train", 5)) // 5), "others wait for each"
