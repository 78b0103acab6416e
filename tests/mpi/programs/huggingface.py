"""Trainings by Transformers' Trainer and by an Accelerate loop; each learner says what it found.

    huggingface.py FOLDER PART...

A part is a number, for that script of docs/huggingface.md, or the name of a function below.
"""

import os
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import find_batch_size
from learner import digest, say
from safetensors.torch import load_file
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    set_seed,
)

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.integrations.accelerate import AdpsgdAccelerator
from hvd_adpsgd.integrations.local_sgd import AdpsgdLocalSGD
from hvd_adpsgd.integrations.transformers import AdpsgdTrainer, AdpsgdTrainingArguments

PAGE = Path(__file__).parents[3] / "docs" / "huggingface.md"
WITH_LOCAL_SGD = Path(__file__).with_name("local_sgd_script.py")


def tell(**facts):
    say(rank=hvd.rank(), **facts)


def flat(model):
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def mean_of_leaders(model):
    """Taken apart from hvd.averaged: without pending corrections, by numpy."""
    with hvd.averaging_paused():
        own = flat(model).numpy()
    told = hvd.allgather_object((hvd.is_leader(), own))
    return np.mean([model for leads, model in told if leads], axis=0)


def distance(model, mean):
    return float(np.abs(flat(model).numpy() - mean).max())


def saved(folder):
    model = GPT2LMHeadModel.from_pretrained(folder)
    model.eval()
    return model


def loss_and_accuracy(trainer, model, rows):
    """In this process alone, all rows in one batch, by Transformers' own Trainer."""
    ids, labels = (torch.stack([row[k] for row in rows]) for k in ("input_ids", "labels"))
    inputs = {"input_ids": ids, "labels": labels}
    trainer.args.average_tokens_across_devices = False
    loss, logits, _ = Trainer.prediction_step(trainer, model, inputs, prediction_loss_only=False)
    right = logits.argmax(-1)[:, :-1] == ids[:, 1:]
    return float(loss), float(right.double().mean())


class Watch(TrainerCallback):
    """Notes the model after every step, and compares every checkpoint with the mean."""

    def __init__(self):
        self.models, self.checkpoints, self.logs = [], {}, []

    def on_step_end(self, args, state, control, model=None, **_):
        self.models.append(digest(model.parameters()))

    def on_log(self, args, state, control, logs=None, **_):
        self.logs.append(logs)

    def on_save(self, args, state, control, model=None, **_):
        mean = mean_of_leaders(model)
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.checkpoints[state.global_step] = distance(saved(folder), mean)


def block(number):
    return re.findall(r"(?ms)^```python\n(.*?)^```", PAGE.read_text())[number]


def script(number):
    """A script of the page, as it stands there; a callback is added to its trainer."""
    return run(block(number), f"script {number}")


def run(code, name):
    names = {"__name__": "__main__"}
    exec(compile(code, name, "exec"), names)
    return names


def page_trainer():
    watch = Watch()
    plain = AdpsgdTrainer.__init__

    def watched(self, *args, **kwargs):
        plain(self, *args, callbacks=[watch], **kwargs)

    AdpsgdTrainer.__init__ = watched
    names = script(0)
    AdpsgdTrainer.__init__ = plain
    trainer = names["trainer"]
    loss, accuracy = loss_and_accuracy(trainer, saved("gpt/final"), names["rows"][70:])
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    tell(
        steps=watch.models, checkpoints=watch.checkpoints, metrics=names["metrics"], norms=norms,
        loss=loss, accuracy=accuracy, main=trainer.is_world_process_zero(),
        final=distance(trainer.model, flat(saved("gpt/final")).numpy()),
    )  # fmt: skip


def page_accelerate():
    AcceleratorState._reset_state(reset_partial_state=True)  # as at the start of the script
    names = script(1)
    model, (x, y) = names["model"], names["data"][90:]
    right = torch.cat(names["right"])
    with hvd.averaged(model):
        expected = float((model(x).argmax(-1) == y).double().mean())
    file = load_file("model/model.safetensors")
    tell(
        held_out=len(right), right=float(right.double().mean()), expected=expected,
        apart=hvd.consensus_distance(model),
        file=all(torch.equal(file[k], v) for k, v in model.state_dict().items()),
        last_state=all(
            torch.allclose(v, model.state_dict()[k], atol=1e-6)
            for k, v in load_file("state1/model.safetensors").items()
        ),
    )  # fmt: skip


def page_local_sgd():
    """A script with LocalSGD, whose two imports become those of the page."""
    AcceleratorState._reset_state(reset_partial_state=True)
    apart, leave = [], AdpsgdLocalSGD.__exit__

    def measured(self, *error):
        apart.append(hvd.consensus_distance(self.model))
        leave(self, *error)
        apart.append(hvd.consensus_distance(self.model))

    AdpsgdLocalSGD.__exit__ = measured
    imports = r"(?m)^from accelerate.*\n"
    code, count = re.subn(imports, "", WITH_LOCAL_SGD.read_text())
    names = run(block(2) + code, WITH_LOCAL_SGD.name)
    AdpsgdLocalSGD.__exit__ = leave
    before = flat(names["model"])
    given = {"accelerator": names["accelerator"], "model": names["model"]}
    unequal = names["model"].weight
    with AdpsgdLocalSGD(**given, enabled=False):
        unequal.data.add_(hvd.rank())
    kept = hvd.consensus_distance(names["model"])
    unequal.data.sub_(hvd.rank())
    try:
        with AdpsgdLocalSGD(**given):
            raise KeyError
    except KeyError:
        pass  # nobody waits for the others
    try:
        AdpsgdLocalSGD(object(), names["model"])
    except ConfigError as error:
        refused = str(error)
    tell(
        exits=apart, imports=count, counted=names["local_sgd"].num_steps, kept=kept, refused=refused,
        accuracy_of_mean=names["accuracy"], unchanged=torch.allclose(before, flat(names["model"])),
    )  # fmt: skip


class Collator:
    """Batches of rows, and which rows this learner has had."""

    def __init__(self):
        self.batches = []

    def __call__(self, rows):
        self.batches.append([row["number"] for row in rows])
        return {k: torch.stack([row[k] for row in rows]) for k in ("input_ids", "labels")}


def tiny():
    sizes = {"n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 256}
    dropouts = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0))


def made(length):
    """Rows of bytes; the labels of row i begin after 1 + i % 9 bytes, so batches differ in tokens."""
    text = torch.tensor(list(PAGE.read_bytes()[: length * 16])).view(length, 16)
    places = torch.arange(16).expand(length, 16)
    labels = text.masked_fill(places <= torch.arange(length)[:, None] % 9, -100)
    return [{"number": i, "input_ids": text[i], "labels": labels[i]} for i in range(length)]


def arguments(**more):
    given = {"output_dir": "run", "report_to": "none", "disable_tqdm": True}
    given |= {"remove_unused_columns": False, "per_device_train_batch_size": 2}
    given["per_device_eval_batch_size"] = 2
    return AdpsgdTrainingArguments(**{**given, **more})


def first_step():
    """One step of SGD against the gradients of each super learner's tokens, computed in one process."""
    set_seed(100 + hvd.rank())  # models differ until the learners have that of the first
    model, rows, collator = tiny(), made(16), Collator()
    before = hvd.broadcast_object({k: v.clone() for k, v in model.state_dict().items()})
    lr, passes = 0.5, 2
    args = arguments(
        max_steps=1, optim="sgd", learning_rate=lr, lr_scheduler_type="constant", max_grad_norm=0.0,
        gradient_accumulation_steps=passes, save_strategy="no",
    )  # fmt: skip
    AdpsgdTrainer(model=model, args=args, train_dataset=Stream(), data_collator=collator).train()
    told = hvd.allgather_object((hvd.super_rank(), collator.batches[:passes]))
    reference, expected = tiny(), 0.0
    for super_rank in range(hvd.super_size()):
        numbers = [i for mine, batches in told if mine == super_rank for b in batches for i in b]
        reference.load_state_dict(before)
        reference.zero_grad()
        ids, labels = (torch.stack([rows[i][k] for i in numbers]) for k in ("input_ids", "labels"))
        reference(input_ids=ids, labels=labels).loss.backward()
        grads = torch.cat([p.grad.flatten().double() for p in reference.parameters()])
        expected = expected + (flat(reference) - lr * grads).numpy() / hvd.super_size()
    reference.load_state_dict(before)
    tell(
        step_error=distance(model, expected), step_size=distance(reference, expected),
        step_rows=[i for _, batches in told for b in batches for i in b],
    )  # fmt: skip


class First:
    """A metric that is best at the first evaluation."""

    def __init__(self):
        self.calls = 0

    def __call__(self, predicted):
        self.calls += 1
        return {"early": -self.calls, "rows": len(predicted.predictions)}


def trained(folder, **more):
    rows, resume, callbacks = made(23), more.pop("resume", None), more.pop("callbacks", [])
    set_seed(7)
    args = arguments(
        output_dir=folder, num_train_epochs=3, learning_rate=1e-2, eval_strategy="epoch",
        save_strategy="epoch", gradient_accumulation_steps=2, logging_steps=1, **more,
    )  # fmt: skip
    collator, watch = Collator(), Watch()
    trainer = AdpsgdTrainer(
        model=tiny(), args=args, train_dataset=rows, eval_dataset=rows[:5], data_collator=collator,
        compute_metrics=First(), callbacks=[watch, *callbacks],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer, watch


def best_and_resume():
    best = {"load_best_model_at_end": True, "metric_for_best_model": "early"}
    trainer, _ = trained("best", bf16=True, use_cpu=True, greater_is_better=True, **best)
    first = Path(trainer.state.best_model_checkpoint)
    trainer.save_model("best/final")
    tell(
        best=first.name, best_apart=distance(trainer.model, flat(saved(first)).numpy()),
        best_saved=distance(saved("best/final"), flat(saved(first)).numpy()),
        last_apart=distance(trainer.model, flat(saved("best/checkpoint-6")).numpy()),
    )  # fmt: skip
    resume("best", first)


def stopped():
    """The first evaluation is the best one, so the second ends the training."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "early"}
    callbacks = [EarlyStoppingCallback(early_stopping_patience=1)]
    trainer, _ = trained("stopped", greater_is_better=True, callbacks=callbacks, **best)
    tell(stopped_at=trainer.state.global_step)


def resume(folder="best", checkpoint=None):
    checkpoint = checkpoint or Path(folder, "checkpoint-6")
    trainer, watch = trained("resumed", resume=str(checkpoint))
    states = trainer.optimizer.state_dict()["state"].values()
    tell(
        resumed_steps=len(watch.models), resumed_to=trainer.state.global_step,
        optimizer_steps=sorted({int(state["step"]) for state in states}),
        scheduler_steps=trainer.lr_scheduler.last_epoch,
        resumed_rows={e["eval_rows"] for e in trainer.state.log_history if "eval_rows" in e} == {5},
        resumed_checkpoints=watch.checkpoints, train_loss=watch.logs[-1]["train_loss"],
        losses=[logs["loss"] for logs in watch.logs if "loss" in logs],
    )  # fmt: skip


def refusals():
    found = []
    for what in ({"dispatch_batches": True}, {}):
        try:
            if what:
                AdpsgdTrainer(model=tiny(), args=arguments(accelerator_config=what))
            else:
                AdpsgdTrainer(model=tiny())  # makes plain TrainingArguments
        except ConfigError as error:
            found.append(str(error))
    tell(refused=found)


def operations():
    """What scripts call on an Accelerator, with different shapes on the learners."""
    AcceleratorState._reset_state(reset_partial_state=True)
    set_seed(hvd.rank())
    accelerator, rank = AdpsgdAccelerator(mixed_precision="bf16"), hvd.rank()
    long = torch.full((2, rank + 1), float(rank))
    padded = accelerator.pad_across_processes(long, dim=1, pad_index=-1)
    first = accelerator.pad_across_processes(long, dim=-1, pad_index=-1, pad_first=True)
    assert accelerator.pad_across_processes(torch.ones(2), dim=1).shape == (2,)
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(13), batch_size=2))
    numbers, names = [], []
    for batch in loader:
        numbers += accelerator.gather_for_metrics({"a": (batch,)})["a"][0].tolist()
        names += accelerator.gather_for_metrics([str(int(i)) for i in batch])
    shuffled = torch.utils.data.DataLoader(range(16), batch_size=2, shuffle=True)
    shuffled = accelerator.prepare(shuffled)
    epochs = [[int(i) for batch in shuffled for i in accelerator.gather(batch)] for _ in range(2)]
    with accelerator.split_between_processes(list(range(6))) as part:
        parts = accelerator.gather(torch.tensor(len(part))).tolist()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    started = hvd.allgather_object(digest(model.parameters()))
    apart = []
    for _ in range(2):
        accelerator.backward(model(torch.randn(3, 2)).square().mean())
        norm = float(accelerator.clip_grad_norm_(model.parameters(), 1e-3))
        apart.append(hvd.allgather_object((hvd.super_rank(), norm)))
        optimizer.step()
        optimizer.zero_grad()
    once = accelerator.on_main_process(lambda: accelerator.process_index)()
    tell(
        started=started, padded=padded.tolist(), first=first.tolist(), numbers=numbers, names=names,
        parts=parts, epochs=epochs,
        mean=float(accelerator.reduce(torch.tensor([float(rank)]), "mean")), norms_by_super=apart, once=once,
        highest=int(accelerator.reduce(torch.tensor([rank]), "max")),
        clipped=[digest(model.parameters()), hvd.super_rank()], sharded_batch=find_batch_size(batch),
    )  # fmt: skip


class Slow(AdpsgdTrainer, TrainerCallback):
    """Learner 0 needs three times as long. Notes times of steps and of the training."""

    def on_train_begin(self, *_, **__):
        self.step_s, self.span = [], [time.monotonic()]

    def on_step_begin(self, *_, **__):
        self.at = time.monotonic()
        pause()

    def on_step_end(self, *_, **__):
        self.step_s.append(time.monotonic() - self.at)

    def on_train_end(self, *_, **__):
        self.span.append(time.monotonic())


def pause():
    time.sleep(0.15 if hvd.rank() == 0 else 0.05)


def slow(resume=None, each=40, **more):
    """Three epochs; the rate goes down to 0."""
    rows = [{**row, "number": i} for i, row in enumerate(made(100) * each)]
    more = {"num_train_epochs": 3, "eval_strategy": "epoch", "save_strategy": "epoch", **more}
    args = arguments(
        output_dir="slow", learning_rate=1e-3, per_device_train_batch_size=5, logging_steps=10,
        disable_tqdm=False, **more,
    )  # fmt: skip
    collator = Collator()
    trainer = Slow(
        model=tiny(), args=args, train_dataset=rows, eval_dataset=rows[:8], data_collator=collator
    )
    trainer.callback_handler.add_callback(trainer)
    output = trainer.train(resume_from_checkpoint=resume)
    tell(
        span=trainer.span, step_s=trainer.step_s, rows=[i for b in collator.batches for i in b if i > 7],
        rate=trainer.lr_scheduler.get_last_lr()[0], counted=trainer.state.global_step,
        logged=[e["step"] for e in trainer.state.log_history if "loss" in e], loss=output.training_loss,
        evaluated=[e["step"] for e in trainer.state.log_history if "eval_loss" in e],
        saved=sorted(path.name for path in Path("slow").glob("checkpoint-*")),
        shown=[c.current_step for c in trainer.callback_handler.callbacks if type(c) is ProgressCallback],
    )  # fmt: skip


once = partial(slow, each=16, num_train_epochs=1, eval_strategy="steps")
by_steps = partial(once, eval_steps=10, save_strategy="steps", save_steps=30)
resume_by_steps = partial(once, "slow/checkpoint-30", eval_steps=10)
cut = partial(once, max_steps=43, eval_steps=7, save_strategy="no")
each_step = partial(once, max_steps=4, eval_steps=0.01, save_strategy="no")


def uneven_loop():
    """An Accelerate loop with mean and checkpoint after each of three epochs."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, data = AdpsgdAccelerator(), torch.arange(4000)
    sampler, model = hvd.DynamicSampler(data, batch_size=5), torch.nn.Linear(1, 1)
    loader = torch.utils.data.DataLoader(data, batch_size=5, sampler=sampler)
    plain = torch.optim.SGD(model.parameters(), 1e-9)
    model, optimizer, loader = accelerator.prepare(model, plain, loader)
    step_s, rows, span = [], [], [time.monotonic()]
    for epoch in range(3):
        for batch in loader:
            at = time.monotonic()
            pause()
            accelerator.backward(model(batch[:, None].float()).sum())
            optimizer.step()
            optimizer.zero_grad()
            step_s.append(time.monotonic() - at)
            rows += batch.tolist()
        accelerator.save_state(f"uneven{epoch}")
    span.append(time.monotonic())
    tell(step_s=step_s, rows=rows, span=span)


def slow_loop():
    """An Accelerate loop whose second super learner begins each epoch when the first has made half of it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, rows = AdpsgdAccelerator(gradient_accumulation_steps=3), torch.arange(206)
    model = torch.nn.Linear(1, 1)
    sampler = hvd.DynamicSampler(rows, batch_size=2)
    loader = torch.utils.data.DataLoader(rows, batch_size=2, sampler=sampler)
    plain = torch.optim.SGD(model.parameters(), 1e-9)
    model, optimizer, loader = accelerator.prepare(model, plain, loader)
    seen = []
    for epoch in range(2):
        half, made = Path(f"half{epoch}"), []
        for batch in loader:
            while hvd.super_rank() and not half.exists():
                time.sleep(0.01)
            with accelerator.accumulate(model):
                accelerator.backward(model(batch[:, None].float()).sum())
                optimizer.step()
                optimizer.zero_grad()
            made += batch.tolist()
            if len(made) > 206 / 2 / 2:  # its learners are two
                half.touch()
        hvd.barrier()
        seen.append(made)
    for _ in loader:
        break  # an epoch that is left early is over
    batches = hvd.DynamicBatchSampler(rows, batch_size=2)
    whole = accelerator.prepare(torch.utils.data.DataLoader(rows, batch_sampler=batches))
    seen.append([i for batch in whole for i in batch.tolist()])
    tell(seen=seen, after=sum(map(len, loader)))


class Killed(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step >= 2 and hvd.rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(made(40))


def killed():
    rows = made(23)
    args = arguments(
        output_dir="killed", num_train_epochs=6, learning_rate=1e-2, eval_strategy="epoch",
        save_strategy="epoch", logging_steps=1,
    )  # fmt: skip
    trainer = AdpsgdTrainer(
        model=tiny(), args=args, train_dataset=rows, eval_dataset=rows[:7], compute_metrics=First(),
        data_collator=Collator(), callbacks=[Killed()],
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model("killed/final")
    loss, _ = loss_and_accuracy(trainer, saved("killed/final"), rows[:7])
    tell(
        step=trainer.state.global_step, rows=metrics["eval_rows"], main=trainer.is_world_process_zero(),
        failed=list(hvd.failed_ranks()), final=distance(trainer.model, flat(saved("killed/final")).numpy()),
        checkpoints=sorted(p.name for p in Path("killed").glob("checkpoint-*")),
        finite=bool(np.isfinite(loss)),
    )  # fmt: skip


def iterable():
    collator = Collator()
    args = arguments(output_dir="iterable", max_steps=5, learning_rate=1e-2, save_strategy="no")
    trainer = AdpsgdTrainer(model=tiny(), args=args, train_dataset=Stream(), data_collator=collator)
    trainer.train()
    told = hvd.allgather_object(collator.batches[:5])
    tell(rows_of_all=sorted(i for batches in told for batch in batches for i in batch))


def main():
    os.chdir(sys.argv[1])
    hvd.init()
    for part in sys.argv[2:]:
        globals()[part]()


main()
