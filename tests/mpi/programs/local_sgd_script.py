"""A script with Accelerate's LocalSGD, as its users write it; huggingface.py changes the two imports."""

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD

accelerator = Accelerator(gradient_accumulation_steps=2)
x = torch.randn(46, 8, generator=torch.Generator().manual_seed(0))
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()), batch_size=2
)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for _ in range(2):
    model.train()
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=3) as local_sgd:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
    model.eval()
    with torch.no_grad():  # on all processes
        right = [accelerator.gather_for_metrics(model(x).argmax(-1) == y) for x, y in loader]
    accuracy = float(torch.cat(right).float().mean())
