"""A training loop that knows amp only as a loss scaler, in the way of timm's ApexScaler."""

import argparse

import torch
from outcome import Outcome
from torch import nn

try:
    from apex import amp

    has_apex = True
except ImportError:
    amp = None
    has_apex = False

try:
    from timm.utils import ApexScaler
except ImportError:

    class ApexScaler:
        state_dict_key = "amp"

        def __call__(self, loss, optimizer, clip_grad=None, parameters=None, create_graph=False):
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward(create_graph=create_graph)
            if clip_grad is not None:
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), clip_grad)
            optimizer.step()

        def state_dict(self):
            if "state_dict" in amp.__dict__:
                return amp.state_dict()

        def load_state_dict(self, state_dict):
            if "load_state_dict" in amp.__dict__:
                amp.load_state_dict(state_dict)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--fp32", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(19)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten())
    model.append(nn.Linear(4 * 16, 5))
    outcome = Outcome(model[4])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-4)
    loss_scaler = None
    if has_apex and not args.fp32:
        # What it returns is thrown away: models and optimizers are changed in place.
        amp.initialize(model, optimizer, opt_level=args.opt_level)
        loss_scaler = ApexScaler()
    images, target = torch.randn(16, 3, 6, 6), torch.randint(0, 5, (16,))
    for _ in range(20):
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)(model(images), target)
        optimizer.zero_grad()
        if loss_scaler is not None:
            loss_scaler(loss, optimizer, clip_grad=5.0, parameters=model.parameters())
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
    state = loss_scaler.state_dict() if loss_scaler is not None else {"loss_scaler0": {}}
    outcome.report(loss, saved=list(state))


if __name__ == "__main__":
    main()
