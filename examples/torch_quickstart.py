import torch
import torch.distributed as dist

from unified_ddp.torch import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # each rank its own data; rank 0's weights are sent to all
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100):
    inputs = torch.randn(32, 4)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()  # gradients are averaged over ranks while this runs
    optimizer.step()
print(f"rank {dist.get_rank()}: loss {loss.item():.6f}")
dist.destroy_process_group()
