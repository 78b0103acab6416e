"""An ordinary Horovod training script, as Horovod's documentation teaches it.

Nothing in it knows of hvd_adpsgd but the line that chooses the import. It learns to tell four
clusters of points apart, writes a checkpoint per epoch, and resumes from the last one.
"""

import argparse
import importlib
import json
import os

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

hvd = importlib.import_module(os.environ.get("HOROVOD_MODULE", "horovod.torch"))

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--base-lr", type=float, default=0.02)
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--clip", type=float, default=5.0)
parser.add_argument("--checkpoint-format", required=True)


def clusters(count, seed):
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=random)
    centres = 1.5 * torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    points = centres[labels] + 0.4 * torch.randn(count, 2, generator=random)
    return TensorDataset(points, labels)


def loader(dataset, batch_size):
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler), sampler


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    total, count = 0.0, 0
    for data, target in train_loader:
        optimizer.zero_grad()
        # Split data into sub-batches
        for i in range(0, len(data), args.batch_size):
            part, part_target = data[i : i + args.batch_size], target[i : i + args.batch_size]
            loss = functional.cross_entropy(model(part), part_target)
            total, count = total + loss.item(), count + 1
            (loss * len(part) / len(data)).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        with optimizer.skip_synchronize():
            optimizer.step()
    scheduler.step()
    return metric_average(total / count, "train_loss")


def evaluate():
    model.eval()
    right = count = 0
    with torch.no_grad():
        for data, target in test_loader:
            right += (model(data).argmax(dim=1) == target).sum().item()
            count += len(target)
    return metric_average(right / count, "accuracy")


def save_checkpoint(epoch):
    if hvd.rank() == 0:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))


args = parser.parse_args()
hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)

# If set > 0, will resume training from a given checkpoint.
resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break
# Horovod: broadcast resume_from_epoch from rank 0 to the other ranks.
resume_from_epoch = hvd.broadcast(
    torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch"
).item()

train_loader, train_sampler = loader(
    clusters(1536, seed=1), args.batch_size * args.batches_per_allreduce
)
test_loader, _ = loader(clusters(256, seed=2), 64)

model = torch.nn.Sequential(
    torch.nn.Linear(2, 24), torch.nn.BatchNorm1d(24), torch.nn.ReLU(), torch.nn.Linear(24, 4)
)
# Horovod: scale learning rate by the number of learners.
optimizer = torch.optim.SGD(
    model.parameters(), lr=args.base_lr * hvd.size(), momentum=0.9, weight_decay=1e-4
)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    backward_passes_per_step=args.batches_per_allreduce,
    op=hvd.Average,
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)

# Restore from a previous checkpoint, if initial_epoch is specified.
if resume_from_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
# Horovod: broadcast parameters & optimizer state.
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

losses = []
at_start = evaluate()
for epoch in range(resume_from_epoch, args.epochs):
    losses.append(train(epoch))
    save_checkpoint(epoch)
facts = {
    "rank": hvd.rank(),
    "size": hvd.size(),
    "resumed": resume_from_epoch,
    "losses": losses,
    "at_start": at_start,
    "accuracy": evaluate(),
}
with open(1, "wb", closefd=False) as out:  # os.write may write a part only
    out.write(f"\n@learner {json.dumps(facts)}\n".encode())
